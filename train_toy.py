"""Train a toy TADM, ADLM, MDLM or uniform-state model on TinyStories, the built-in stories or a
text file of your own, or give a trained MDLM or uniform-state model an anchor cache afterwards.

    python train_toy.py                     # TinyStories (one download of 22 MB), 2-core laptop CPU
    python train_toy.py --data stories      # the built-in stories, no network, minutes
    python train_toy.py --resume            # continue an interrupted run
    python train_toy.py --posttrain out/mdlm.pt     # train a fusion on a trained --model mdlm

The method is in tadm.py. Here are the stories, the tokens, the training loop and the report, then
the plumbing: options, files, errors. Left out: several GPUs, packing of stories, gradient
accumulation, a learned tokenizer.
"""

import argparse
import contextlib
import copy
import dataclasses
import functools
import hashlib
import itertools
import math
import os
import random
import re
import shlex
import signal
import sys
import tempfile
import time
import urllib.request
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

import tadm

N_STORIES = 50_000
FORMAT = "tadm-toy checkpoint 2"
END = "<|endoftext|>"  # one token: fills a canvas up, and separates the stories of a text file


def posttrained(base, config):
    """A base of 6 + 2 layers is split into 3 shared ones, 3 of the anchor and 2 of the denoiser."""
    rank = 4 * (5 * config.d_model // 32 or 1)  # 40 for d = 64
    return tadm.PostTrained(base(config), config.n_anchor // 2, config.n_denoiser, rank)


MODELS = {"tadm": tadm.TADM, "adlm": tadm.ADLM, "mdlm": tadm.MDLM, "uniform": tadm.UniformLM}
POSTTRAINED = {"mdlm": "posttrained", "uniform": "posttrained_uniform"}  # of which base
MODELS |= {name: functools.partial(posttrained, MODELS[base]) for base, name in POSTTRAINED.items()}


# ----------------------------------------------------------------- 1. the built-in stories
# [Words] are missing in half of the stories, {slots} are drawn anew each time, and CAPITALS are
# facts: drawn once per story, so that its sentences agree on them. Each fact is told by a sentence
# that is never missing, so no two ways of drawing give the same text.

STORY = [
    "{opening}, CHILD and FRIEND {went} to the PLACE.",
    " {who} had a[ {size}] COLOUR THING.",
    "[ The[ COLOUR] THING was[ very] {nice}.]",
    " At the PLACE {who} {saw} a[ {size}] ANIMAL.",
    " The ANIMAL took the[ COLOUR] THING[ and ran away].",
    " {who} {found} the[ COLOUR] THING under a {tree}.",
    "[ {they} played[ at the PLACE].]",
]
FACTS = {
    "CHILD FRIEND": ["Tom", "Mia", "Ben", "Lily", "Sam", "Anna", "Max", "Lucy"],  # two of them
    "PLACE": ["park", "farm", "beach", "zoo", "lake", "forest", "school", "garden"],
    "COLOUR": ["red", "blue", "green", "pink", "white", "brown", "black", "yellow"],
    "THING": ["ball", "kite", "boat", "book", "cup", "hat", "drum", "ring"],
    "ANIMAL": ["dog", "cat", "fox", "duck", "goat", "monkey", "horse", "frog"],
}
SLOTS = {
    "opening": ["Once", "One day", "One fine day"],
    "went": ["went", "ran"],
    "who": ["CHILD", "FRIEND"],
    "they": ["They", "CHILD and FRIEND", "FRIEND and CHILD"],
    "size": ["big", "little"],
    "nice": ["nice", "old", "new"],
    "saw": ["saw", "met"],
    "found": ["found", "saw"],
    "tree": ["tree", "bush", "bench"],
}


def write_story(rng):
    """One story. rng: random.Random."""
    facts = {}
    for kinds, words in FACTS.items():
        facts |= zip(kinds.split(), rng.sample(words, len(kinds.split())))
    text = "".join(STORY)
    while "[" in text:  # the innermost brackets first
        text = re.sub(r"\[([^][]*)\]", lambda m: rng.choice(["", m[1]]), text)
    text = re.sub(r"\{(\w+)\}", lambda m: rng.choice(SLOTS[m[1]]), text)
    return re.sub("[A-Z]{2,}", lambda m: facts[m[0]], text)


def story_entropy():
    """Nats per story, exact: the sum over all draws, as each text has one way to be drawn."""
    nats, text = 0.0, "".join(STORY)
    for kinds, words in FACTS.items():
        nats += math.log(math.perm(len(words), len(kinds.split())))
    for draw in re.finditer(r"\[|\{(\w+)\}", text):
        before = text[: draw.start()]
        p = 0.5 ** (before.count("[") - before.count("]"))  # that this place is written
        nats += p * math.log(len(SLOTS[draw[1]]) if draw[1] else 2)
    return nats


def pattern(template):
    """A template as a regular expression, for texts with their facts in capitals."""
    for mark, code in {".": r"\.", "[": "(?:", "]": ")?"}.items():
        template = template.replace(mark, code)
    return re.sub(r"\{(\w+)\}", lambda m: f"(?:{'|'.join(SLOTS[m[1]])})", template)


def in_capitals(text):
    """The text with its facts in capitals: its first colour becomes COLOUR wherever it stands.
    Another colour stays what it is, and no template has it."""
    facts = {}
    for kinds, words in FACTS.items():
        facts |= dict.fromkeys(kinds.split(), "?")  # was in capitals before
        first = dict.fromkeys(word for word in re.findall(r"\w+", text) if word in words)
        facts |= zip(first, kinds.split())
    return re.sub(r"\w+", lambda m: facts.get(m[0], m[0]), text)


def is_story(text):
    """Whether the tables can write this text."""
    return bool(re.fullmatch(pattern("".join(STORY)), in_capitals(text)))


def valid_sentences(text):
    """(number of valid sentences, number of sentences). Valid: a template of STORY can write it
    with the facts first mentioned in the text."""
    sentences = re.findall(r"[^.]+\.?|\.", in_capitals(text))
    valid = [any(re.fullmatch(pattern(t), s) for t in STORY) for s in sentences]
    return sum(valid), len(valid)


# --------------------------------------------------------------------------- 2. tokens

PIECE = re.compile(r" ?\w+(?:['’]\w+)?| ?[^\w\s]+|\s")  # a word with the space before it


class Tokenizer:
    """Frequent words are one token, others are spelled; joining the tokens gives back the text."""

    def __init__(self, vocab):
        self.vocab, self.ids = vocab, {token: i for i, token in enumerate(vocab)}

    @classmethod
    def train(cls, stories, vocab_size, limit):
        """The end token, all characters, the most frequent words of the stories' first `limit`."""
        words, chars = Counter(), set()
        for story in stories:
            words.update(m[0] for m in itertools.islice(PIECE.finditer(story), limit))
            chars.update(story)
        vocab = [END, *sorted(chars)]
        if len(vocab) > vocab_size:
            fail(f"the text has {len(vocab) - 1} different characters: use "
                 f"--vocab-size {2 * len(vocab)} or more")
        # a word that occurs once is spelled: there is nothing to learn it from
        longer = [word for word, n in words.most_common() if n > 1 and len(word) > 1]
        return cls(vocab + longer[: vocab_size - len(vocab)])

    def encode(self, text, max_tokens=None):
        """List of ids, at most max_tokens. Raises UserError for a character without a token."""
        pieces = (m[0] for m in PIECE.finditer(text))
        tokens = (t for p in pieces for t in ([p] if p in self.ids else p))
        try:
            return [self.ids[t] for t in itertools.islice(tokens, max_tokens)]
        except KeyError as e:
            raise UserError(f"the character {e.args[0]!r} does not occur in the training text, so "
                            "the model has no token for it: leave it out") from None

    def decode(self, ids):
        """The text of a list of ids, up to the first end token."""
        return "".join(self.vocab[i] for i in itertools.takewhile(lambda i: i != 0, ids))


# ----------------------------------------------------------------------------- 3. data
# A canvas holds one story from its beginning, cut at seq_len or filled up with the end token. Text
# without story separators is cut into windows.


def load_data(args, trained=None):
    """Returns (training canvases, validation canvases, Tokenizer). One story in 20 validates.

    trained: a checkpoint that was trained on the same canvases. Raises UserError if it was not.
    """
    if args.data == "stories":
        rng = random.Random(0)
        stories = [write_story(rng) for _ in tqdm(range(N_STORIES), "writing stories", leave=False)]
    elif args.data == "tinystories":
        stories = read_stories(download(**TINYSTORIES))[1:]  # the file begins mid-story
    else:
        stories = read_stories(args.data)
    L, limit = args.seq_len, None
    if len(stories) > 1:
        train, val, limit = [s for i, s in enumerate(stories) if i % 20], stories[::20], L
    else:  # no separators: windows, those of the first twentieth of the text validate
        text = "".join(stories)
        train, val = [text[len(text) // 20 :]], [text[: len(text) // 20]]
    tokenizer = Tokenizer.train(train, args.vocab_size, limit)
    # characters that the training text does not have are left out of the validation text
    val = ["".join(c for c in story if c in tokenizer.ids) for story in val]
    train = [tokenizer.encode(story, limit) for story in tqdm(train, "encoding", leave=False)]
    val = [tokenizer.encode(story, limit) for story in val]
    if not limit:
        n_val, ids = max(1, len(val[0]) // L), val[0] + train[0]
        windows = [ids[i : i + L] for i in range(0, len(ids), L)]
        train, val = windows[n_val:], windows[:n_val]
    rows, n_train = [*train, *filter(None, val)], len(train)
    if not 0 < n_train < len(rows):
        fail(f"the data file {args.data} is too short: it needs two stories, or more than "
             f"{L} tokens, as one canvas validates")
    x = np.zeros((len(rows), L), dtype=np.int64)  # 0 is the end token
    for i, row in enumerate(rows):
        x[i, : len(row)] = row
    x = torch.from_numpy(x)
    data = x[:n_train], x[n_train:], tokenizer
    if trained and trained["data_hash"] != fingerprint(*data):
        fail(f"the data {args.data} is not what the checkpoint was trained on")
    return data


def fingerprint(x_train, x_val, tokenizer):
    """By this hash a checkpoint knows its data again, wherever it lies now."""
    ids = torch.cat([x_train, x_val]).cpu().numpy()
    return hashlib.sha256(ascii(tokenizer.vocab).encode() + ids.tobytes()).hexdigest()


# ------------------------------------------------------------------------------ 4. training


class Muon(torch.optim.Optimizer):
    """Momentum whose update of each matrix is made orthogonal (Jordan et al., 2024).

    The step of a matrix (m, n) is lr * scale * sqrt(max(1, m / n)) times U V^T, where U S V^T is
    the singular value decomposition of its momentum. The scale lets it share AdamW's learning rate.
    torch.optim.Muon, matrix by matrix in bfloat16, made a step on a CPU 1.6 to 2.3 times as long.
    """

    def __init__(self, params, lr=0.0, momentum=0.95, scale=7.0):
        super().__init__(params, {"lr": lr, "momentum": momentum, "scale": scale})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            same_shape = defaultdict(list)  # they are made orthogonal together
            for p in group["params"]:
                if p.grad is not None:
                    mean = self.state[p].setdefault("momentum", torch.zeros_like(p))
                    mean.lerp_(p.grad, 1 - group["momentum"])
                    ahead = p.grad.lerp(mean, group["momentum"])  # Nesterov
                    same_shape[p.shape].append((p, ahead))
            for (m, n), pairs in same_shape.items():
                size = group["lr"] * group["scale"] * max(1, m / n) ** 0.5
                updates = orthogonal(torch.stack([ahead for _, ahead in pairs]))
                for (p, _), update in zip(pairs, updates):
                    p.sub_(size * update)


def orthogonal(x, steps=5):
    """x (B, m, n) with all singular values brought near 1 (0.7 to 1.2), by Newton-Schulz steps: an
    odd polynomial of the matrix is the same polynomial of its singular values."""
    if x.shape[-2] > x.shape[-1]:
        return orthogonal(x.mT, steps).mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        a = x @ x.mT
        x = 3.4445 * x + (2.0315 * a @ a - 4.775 * a) @ x
    return x


def make_optimizers(model):
    """Muon for the matrices of layers and fusion, AdamW for embeddings, heads, norms and biases."""
    parts = ("anchor.", "denoiser.", "blocks.", "fusion.")
    matrices, others = [], []
    for name, p in model.named_parameters():
        if p.requires_grad:
            (matrices if p.ndim == 2 and name.startswith(parts) else others).append(p)
    adamw = torch.optim.AdamW(others, betas=(0.9, 0.98), weight_decay=0.01, fused=True)
    return [Muon(matrices), adamw]


# Eq. 14 with lambda = 1 learns less here. The tokens revealed in a rollout are not those of x, so
# the likeliest clean tokens are what a model without them would say: naive reuse. See README.
KD_WEIGHT = 100.0
UNIFORM_STEPS = 48  # of Algorithm 2, as in the paper


def training_loss(model, x, args, step, g):
    """What this kind of model learns from the clean canvases x (B, L): nats per token."""
    L = x.shape[1]
    if args.model in POSTTRAINED.values():
        steps = max(3, L // 4 if step % 2 else L // 8)  # 3 or more: ages are 0, 1 and 2
        steps = UNIFORM_STEPS if model.mask_id is None else steps
        return tadm.posttrain_loss(model, model.base, x, steps, kd_weight=KD_WEIGHT, generator=g)
    if args.model == "uniform":
        return tadm.uniform_loss(model, x, g)
    # Staleness as in C.2: K in {1, 2, 4, 8}, T from L/8 to 4L.
    refresh_choices = [1, 2, 4, 8] if args.anchors == "stale" else [1]
    steps_choices = [max(1, L * 2**i // 8) for i in range(6)]
    t, t_stale = tadm.sample_times(len(x), refresh_choices, steps_choices, g, x.device)
    return tadm.t_anelbo(model, x, t, t_stale, args.gamma, g)


def train(args, checkpoint, base, x_train, x_val, tokenizer):
    """Train and write checkpoints. Returns the EMA model, or None if Ctrl-C ended the run."""
    device, path = x_train.device, Path(args.out) / f"{args.model}.pt"
    torch.manual_seed(args.seed)
    with explained("these sizes do not fit", ValueError):
        config = tadm.Config(len(tokenizer.vocab), args.seq_len, args.d_model, args.n_heads,
                             args.n_anchor, args.n_denoiser)
    model = MODELS[args.model](config).to(device)
    if base and not checkpoint:  # a resumed run goes on with the base that it began with
        model.base.load_state_dict(base["ema"])
    # An average over the last steps is less noisy than the weights: it is evaluated and sampled.
    ema = copy.deepcopy(model).eval()
    optimizers = make_optimizers(model)
    start, written = 0, None
    if checkpoint:
        start, written = checkpoint["step"], path.stat().st_mtime_ns
        with explained(f"{path} is damaged, or cannot be resumed: its parts do not fit", Exception):
            model.load_state_dict(checkpoint["weights"])
            ema.load_state_dict(checkpoint["ema"])
            for optimizer, state in zip(optimizers, checkpoint["optimizers"]):
                optimizer.load_state_dict(state)
        print(f"resuming {path} at step {start}"
              + ", which was its last: raise --steps to train on" * (start >= args.steps))
    n_all = sum(p.numel() for p in model.parameters())
    n_new = sum(p.numel() for p in model.parameters() if p.requires_grad)
    print(f"{args.model}: {n_new:,} weights to train of {n_all:,}, {config}; "
          f"{len(x_train):,} canvases to train on, {len(x_val):,} to validate")
    data_hash = fingerprint(x_train, x_val, tokenizer)
    every = max(1, args.steps // 10)  # evaluation and checkpoint
    good = f"{path} (step {start})" if start else "none"
    stops, smooth, begin = [], None, time.perf_counter()

    with contextlib.ExitStack() as undo, tqdm(total=args.steps, initial=start, unit="step") as bar:
        for number in (signal.SIGINT, signal.SIGTERM):  # the loop ends where it can save
            before = signal.signal(number, lambda *_: stops.append(1))
            undo.callback(signal.signal, number, before)
        for step in range(start + 1, args.steps + 1):
            # The randomness of a step is a function of (seed, step) alone: a resumed run sees the
            # same noise, and an evaluation in between cannot disturb it.
            g = step_generator(args.seed, step, device)
            rows = torch.randint(len(x_train), (args.batch_size,), generator=g, device=device)
            with autocast(args, device):
                loss = training_loss(model, x_train[rows], args, step, g)

            # The weight 1/t makes some gradients huge: one batch must not undo the others' work.
            model.zero_grad()
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)

            # Warm up while the optimizers' averages are young, then go down to 0 in a line.
            warmup = min(1.0, step / min(100, args.steps))
            for optimizer in optimizers:
                optimizer.param_groups[0]["lr"] = args.lr * warmup * (1 - (step - 1) / args.steps)
                optimizer.step()
            with torch.no_grad():
                keep = min(0.99, step / (step + 9))  # a young average forgets faster
                torch._foreach_lerp_(list(ema.parameters()), list(model.parameters()), 1 - keep)

            # The average is evaluated on the same 128 canvases each time.
            due = step % every == 0 or step == args.steps
            nats = torch.zeros(())
            if due:
                with autocast(args, device):
                    nats = evaluate(ema, x_val[:128], None, 1, g, draws=4).mean()

            # A step may break the weights after a good loss: nothing broken is ever saved.
            weights = model.parameters() if due or stops else ()
            if not all(x.isfinite().all() for x in (loss, norm, nats, *weights)):
                fail(f"the loss is not finite at step {step}; the last good checkpoint: {good}; "
                     "try a smaller --lr or --gamma")

            # One batch says little, as its times are random: show an average.
            smooth = loss.item() if smooth is None else 0.98 * smooth + 0.02 * loss.item()
            speed = per_second((step - start) * args.batch_size * args.seq_len, begin)
            bar.set_postfix_str(f"loss {smooth:.3f} nats/token, {speed:,.0f} tokens/s", False)
            bar.update()

            # All that the next step depends on: a resumed run ends with the very same weights.
            if due or stops:
                written = save({
                    "format": FORMAT, "model": args.model, "config": dataclasses.asdict(config),
                    "vocab": tokenizer.vocab, "data_hash": data_hash, "args": vars(args),
                    "step": step, "weights": model.state_dict(), "ema": ema.state_dict(),
                    "optimizers": [optimizer.state_dict() for optimizer in optimizers],
                }, path, written)
                good = f"{path} (step {step})"
            if stops:
                which = ["--posttrain", args.posttrain] if base else ["--model", args.model]
                line = shlex.join(["python", "train_toy.py", *which, "--out", args.out, "--resume"])
                tqdm.write(f"stopped at step {step}, all saved; to go on: {line}")
                return None
            # A text says more than a number.
            if due:
                with autocast(args, device):
                    z, _ = generate(ema, 1, args.seq_len, 4, g)
                text = tokenizer.decode(z[0].tolist()).replace("\n", " ")
                tqdm.write(f"step {step}: bound {nats:.3f} nats/token | {text[:100]}")
    return ema


def per_second(n, begin):
    """n per second since begin, a time.perf_counter(). Clocks may tick late: never divide by 0."""
    return n / max(time.perf_counter() - begin, 1e-9)


def step_generator(seed, step, device):
    return torch.Generator(device).manual_seed((seed * 1_000_003 + step) % 2**63)


def autocast(args, device):
    return torch.autocast(device.type, torch.bfloat16, enabled=args.dtype == "bfloat16")


# --------------------------------------------------------------------------------- 5. report


def generate(model, num, steps, refresh_every, generator, **options):
    """Sample num canvases with this model: z (num, L), and the stats of tadm.sample."""
    sampler = tadm.sample_uniform if model.mask_id is None else tadm.sample
    return sampler(model, num, model.config.seq_len, steps, refresh_every, generator=generator,
                   **options)


def without_fusion(model):
    """The same post-trained model with naive reuse of its anchor."""
    naive = copy.copy(model)
    naive.naive = True
    return naive


def valid_shares(z, tokenizer):
    """Shares of valid stories, and of valid sentences, in the canvases z (N, L). A story fills its
    canvas: after its end only end tokens may follow."""
    texts = ["".join(tokenizer.vocab[i] for i in row) for row in z.tolist()]
    texts = [re.sub(f"({re.escape(END)})+$", "", text) for text in texts]
    counts = [valid_sentences(text) for text in texts]
    valid, sentences = (sum(column) for column in zip(*counts))
    return sum(map(is_story, texts)) / len(texts), valid / max(1, sentences)


def fusion_share(model):
    """Multiply-adds of the fusion as a share of a layer's; 0 without a fusion."""
    if not hasattr(model, "fusion") or getattr(model, "naive", False):
        return 0.0
    d, L, fusion = model.config.d_model, model.config.seq_len, model.fusion
    work = sum(p.numel() for p in fusion.parameters() if p.dim() == 2)
    if isinstance(fusion, tadm.PairedFusion):  # it reads the anchor's canvas and the current one
        both = [fusion.reduce_c, fusion.qkv, fusion.out, fusion.mlp[0], fusion.mlp[2]]
        work += sum(layer.weight.numel() for layer in both)
        work += 2 * 2 * L * fusion.out.in_features  # two attentions
    return work / (12 * d * d + 2 * L * d)


def evaluate(model, x, steps, refresh_every, generator, **options):
    """tadm.bound of the canvases x (N, L), a few at a time: (N,) nats per token; Eq. 37 if there
    is no mask."""
    bound = tadm.bound
    if model.mask_id is None:
        bound, steps = tadm.uniform_bound, steps or UNIFORM_STEPS
    parts = [bound(model, rows, steps, refresh_every, generator, **options)
             for rows in x.split(64)]
    return torch.cat(parts)


def measure(model, x, tokenizer, steps, refresh_every, num, single, teacher=None, **spacing):
    """One row of a table, and the canvases z (num, L) that were sampled for it, always with the
    same noise. Layer calls are per step, relative to a model of `single` layers."""
    noise = [step_generator(0, i, x.device) for i in range(3)]
    policy = (steps, refresh_every)
    row = {"bound": float(evaluate(model, x, *policy, noise[0], **spacing).mean())}
    if teacher is not None:
        kl = evaluate(model, x, *policy, noise[1], teacher=teacher, **spacing)
        row["KL"] = float(kl.mean())
    begin = time.perf_counter()
    z, stats = generate(model, num, *policy, noise[2], **spacing)
    row["tokens/s"] = per_second(z.numel(), begin)
    layers, fused = stats["layer_calls"], stats["denoiser_calls"] * fusion_share(model)
    row["stories"], row["sentences"] = valid_shares(z, tokenizer)
    row["layers"], row["+ fusion"] = layers / steps / single, (layers + fused) / steps / single
    return row, z


def show(title, table):
    """Print rows of strings, the first one the head, as a Markdown table."""
    width = [max(2, *map(len, column)) for column in zip(*table)]
    line = ["-" * width[0], *("-" * (w - 1) + ":" for w in width[1:])]
    print(f"\n{title}\n")
    for row in (table[0], line, *table[1:]):
        cells = [row[0].ljust(width[0]), *(c.rjust(w) for c, w in zip(row[1:], width[1:]))]
        print(f"| {' | '.join(cells)} |")


def report(model, x_val, tokenizer, args):
    """Print the bound, the closing table, samples and the command to try next."""
    L, x, device = args.seq_len, x_val[:512], x_val.device
    nats = evaluate(model, x, None, 1, step_generator(0, 0, device))
    characters = sum(len(tokenizer.decode(row)) for row in x.tolist())
    print(f"\nbound on {len(x)} validation canvases, T -> infinity, fresh anchors: "
          f"{nats.mean():.4f} +- {nats.std(correction=0) / math.sqrt(len(x)):.4f} nats/token, "
          f"{nats.sum() * L / max(1, characters):.4f} nats/character")
    columns = {"bound": ".4f", "layers": ".2f", "+ fusion": ".2f", "tokens/s": ",.0f",
               "speed-up": ".2f"}
    if args.data == "stories":
        print(f"true entropy of the built-in stories: {story_entropy() / L:.4f} nats/token")
        columns |= {"stories": ".0%", "sentences": ".0%"}
    # single: the layers of a single-stage model of that depth
    steps, single, teacher = 2 * L, args.n_anchor or args.n_denoiser, None
    rows = [(args.model, model, K) for K in (1, 2, 4, 8)]
    if not model.depths[0]:
        rows = rows[:1]  # nothing is cached
    elif hasattr(model, "base"):
        steps, single, teacher = L, args.n_anchor + args.n_denoiser, model.base
        rows, naive = [("teacher", teacher, 1)], without_fusion(model)
        for K in (1, 2, 3, 4, 8):
            rows += [("naive", naive, K), ("fused", model, K)]
        columns = {"bound": ".4f", "KL": ".4f"} | columns
    steps = UNIFORM_STEPS if model.mask_id is None else steps
    num = 64 if args.data == "stories" else 16  # of the others only the speed is told
    table, slowest = [["model", "K", *columns]], None
    for name, m, K in tqdm(rows, "measuring", leave=False):
        row, z = measure(m, x[:256], tokenizer, steps, K, num, single, teacher=teacher)
        slowest = slowest or row["tokens/s"]
        row["speed-up"] = row["tokens/s"] / slowest
        table.append([name, str(K), *(f"{row[key]:{digits}}" for key, digits in columns.items())])
    show(f"T = {steps} reverse steps, anchor refreshed every K steps; {num} canvases sampled "
         "together", table)
    print("\nbound: nats/token, the same noise in every row. layers: layer calls per step, relative"
          f"\nto a single-stage model of {single} layers; + fusion: its multiply-adds counted as "
          "well.\n")
    texts = [("", z[:2])]
    if model.mask_id is not None:
        nucleus, _ = generate(model, 2, steps, 8, step_generator(0, 2, device), top_p=0.9)
        texts += [(", nucleus 0.9", nucleus)]
    for what, canvases in texts:
        for canvas in canvases.tolist():
            print(f"sample (K = {K}{what}): {tokenizer.decode(canvas)}\n")
    path = shlex.quote(str(Path(args.out) / f"{args.model}.pt"))
    print(f"now try: python sample.py {path} --watch")


# =============================================================================== plumbing
# ------------------------------------------------------------------------------ 6. options

PRESETS = {  # for a 2-core CPU, and for one consumer GPU with 8 GB
    "cpu": {"seq_len": 96, "d_model": 64, "n_heads": 2, "n_anchor": 6, "n_denoiser": 2,
            "vocab_size": 4096, "batch_size": 32, "lr": 4e-3, "steps": 3000, "dtype": "float32"},
    "gpu": {"seq_len": 256, "d_model": 384, "n_heads": 6, "n_anchor": 6, "n_denoiser": 2,
            "vocab_size": 8192, "batch_size": 64, "lr": 1e-3, "steps": 20_000, "dtype": "bfloat16"},
}
STORIES = {"seq_len": 62, "steps": 2000}  # the longest story has 62 tokens
POSTTRAIN = {"steps": 1000, "batch_size": 16, "lr": 5e-3}
DEFAULTS = {"data": "tinystories", "preset": "cpu", "gamma": 0.0, "seed": 0, "device": "auto",
            "out": "out", "resume": False}
FREE_TO_CHANGE = {"resume", "steps", "out", "device"}  # when a run is resumed
FILES = {"data", "posttrain"}  # may have moved: what is in them decides
ONLY_FOR = {"anchors": ("tadm", "adlm"), "gamma": ("tadm", "adlm")}
SIZES = ("preset", "seq_len", "vocab_size", "d_model", "n_heads", "n_anchor", "n_denoiser")
ONLY_FOR |= dict.fromkeys(("model", *SIZES), ("tadm", "adlm", "mdlm", "uniform"))


def number(kind, low, high=10**9):
    """An argparse type: a number of that kind in [low, high]."""

    def convert(text):
        value = kind(text)
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text} is not in [{low}, {high}]")
        return value

    convert.__name__ = kind.__name__  # for argparse's own message
    return convert


def parse(argv):
    """The options that were given, as a dict: settings() fills in the others."""
    parser = argparse.ArgumentParser(
        description="Train a toy time-anchored diffusion language model and report how it does.",
        argument_default=argparse.SUPPRESS,
        epilog="Sizes not given come from the preset, or from the checkpoint with --resume.",
    )
    parser.error = fail
    add, count = parser.add_argument, number(int, 1)
    add("--model", choices=list(MODELS)[:4],
        help="tadm (default), its predecessors adlm, mdlm, or uniform: without a mask token")
    add("--posttrain", metavar="CKPT", help="give this trained mdlm or uniform an anchor cache")
    add("--data", help="tinystories (default, one download), stories (built in), or a text file")
    add("--preset", choices=PRESETS, help="sizes for a 2-core cpu (default) or for an 8 GB gpu")
    add("--steps", type=count, help="training steps")
    add("--batch-size", type=count, help="canvases per step")
    add("--lr", type=number(float, 1e-9, 1e30), help="peak learning rate")
    add("--anchors", choices=("stale", "fresh"),
        help="in training (default: stale for tadm, fresh for adlm as its authors do)")
    add("--gamma", type=number(float, 0), help="weight of the anchor's supervision (default 0)")
    add("--seq-len", type=count, help="canvas length L, in tokens")
    add("--vocab-size", type=count, help="at most this many tokens V")
    add("--d-model", type=count, help="width d")
    add("--n-heads", type=count, help="attention heads")
    add("--n-anchor", type=number(int, 0), help="anchor layers, run once in K sampling steps")
    add("--n-denoiser", type=number(int, 0), help="denoiser layers, run at every sampling step")
    add("--seed", type=number(int, 0, 2**63 - 1), help="default 0")
    add("--device", help="auto (default: cuda, else mps, else cpu) or a name that torch knows")
    add("--dtype", choices=("float32", "bfloat16"), help="of the matrix products")
    add("--out", help="folder for the checkpoint, MODEL.pt (default out)")
    add("--resume", action="store_true", help="go on with OUT/MODEL.pt where it stopped")
    return vars(parser.parse_args(argv))


def settings(given):
    """All options: the defaults, the preset, those of a checkpoint, and those given last.

    Returns (Namespace, checkpoint to resume or None, checkpoint to post-train or None).
    """
    args, checkpoint, base = DEFAULTS | PRESETS[given.get("preset", "cpu")], None, None
    model = given.get("model", "tadm")
    if "posttrain" in given:
        base = load_checkpoint(given["posttrain"])
        n_anchor = base["config"]["n_anchor"]
        if base["model"] not in POSTTRAINED or n_anchor < 2:
            fail(f"--posttrain needs a --model mdlm or uniform of --n-anchor 2 or more, this is a "
                 f"{base['model']} of --n-anchor {n_anchor}")
        model = POSTTRAINED[base["model"]]
    for name in ONLY_FOR.keys() & given.keys():
        if model not in ONLY_FOR[name]:
            fail(f"{flag(name)} has no effect on a {model} model: leave it out")
    if base:
        args |= {k: v for k, v in base["args"].items() if k not in FREE_TO_CHANGE} | POSTTRAIN
    elif given.get("data") == "stories":
        args |= STORIES
    args |= {"model": model, "anchors": "fresh" if model == "adlm" else "stale"} | given
    if args["resume"]:
        path = Path(args["out"]) / f"{model}.pt"
        checkpoint = load_checkpoint(path)
        if checkpoint["model"] != model:
            fail(f"{path} holds a {checkpoint['model']} model: rename it {checkpoint['model']}.pt")
        trained = checkpoint["args"]
        for name in given.keys() - FREE_TO_CHANGE - FILES:
            if given[name] != trained.get(name):
                fail(f"{path} was trained with {flag(name)} {trained.get(name)}: to resume it, "
                     "leave that option as it was")
        args |= trained | {"resume": True, "out": args["out"]} | given
    new = not (checkpoint or base)
    if new and args["data"] == "stories" and args["seq_len"] < STORIES["seq_len"]:
        fail(f"the built-in stories need --seq-len {STORIES['seq_len']} or more")
    return argparse.Namespace(**args), checkpoint, base


def flag(name):
    return f"--{name.replace('_', '-')}"


def pick_device(name):
    """A torch.device that works here. Raises UserError."""
    if name == "auto":
        cuda, mps = torch.cuda.is_available(), torch.backends.mps.is_available()
        name = "cuda" if cuda else "mps" if mps else "cpu"
        print(f"device: {name}")
    message = f"--device {name} cannot be used here: try --device cpu"
    with explained(message, RuntimeError, AssertionError):
        torch.zeros(1, device=name).item()
        return torch.device(name)


# -------------------------------------------------------------------------------- 7. files

TINYSTORIES = {
    "url": "https://huggingface.co/datasets/roneneldan/TinyStories/resolve/main/"
    "TinyStoriesV2-GPT4-valid.txt",
    "size": 22_502_601,
    "sha256": "6874bae9a4c1a4e7edcf0e53b86c17817e9cf881fc75ff2368da457b80c0585d",
}


def download(url, size, sha256, timeout=10):
    """The path of this file in the user's cache, fetched if it is not there. Raises UserError."""
    with explained("TinyStories could not be downloaded", Exception):  # from no network to no home
        cache = os.environ.get("XDG_CACHE_HOME", "")  # by the standard, a relative one is none
        cache = Path(cache) if os.path.isabs(cache) else Path.home() / ".cache"
        path = cache / "tadm-toy" / url.rpartition("/")[2]
        if path.is_file():  # whole, as it was checked before it got this name
            return path
        data = bytearray()
        with (
            urllib.request.urlopen(url, timeout=timeout) as answer,
            tqdm(total=size, unit="B", unit_scale=True, desc="downloading TinyStories") as bar,
        ):
            while chunk := answer.read(1 << 16):
                data += chunk
                bar.update(len(chunk))
        if hashlib.sha256(data).hexdigest() != sha256:
            raise ValueError(f"{len(data):,} bytes from {url} are not the expected file")
        write_file(path, "the download", lambda part: part.write_bytes(data))
        return path


def read_stories(path):
    """The stories of a UTF-8 text file, or its whole text where there are no separators."""
    with explained(f"cannot read the data file {path}", OSError, UnicodeDecodeError):
        text = Path(path).read_text(encoding="utf-8-sig")
    stories = [s.strip() for s in text.split(END)]
    return list(dict.fromkeys(s for s in stories if s))  # no story twice, or in both splits


def write_file(path, option, write):
    """Call write(another path), then rename that to path: all of the file, or nothing of it."""
    path = Path(path)
    message = f"{option}: cannot write {path}: is it a folder, or the disk full?"
    with explained(message, OSError, RuntimeError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(".part", dir=path.parent) as folder:
            part = Path(folder) / path.name
            write(part)
            part.replace(path)


def save(checkpoint, path, mine):
    """Write a checkpoint, and return the time of the file. One that has not the time `mine` was
    written by another run: it is kept beside this one."""

    def write(part):
        torch.save(checkpoint, part)
        if path.exists() and path.stat().st_mtime_ns != mine:
            names = (path.with_suffix(f".{i}.pt") for i in itertools.count(1))
            old = path.replace(next(name for name in names if not name.exists()))
            tqdm.write(f"{path} exists: kept as {old}")

    write_file(path, "--out", write)
    return path.stat().st_mtime_ns


def load_checkpoint(path):
    """The dict that train() saved: plain types and tensors. Raises UserError."""
    if not os.path.isfile(path):
        fail(f"there is no checkpoint {path}: train one with python train_toy.py")
    message = f"{path} is not a checkpoint of this project, or of another version of it"
    with explained(message, Exception):  # torch raises all kinds
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        if checkpoint["format"] != FORMAT:
            raise ValueError("another format")
        needed = {"model", "config", "vocab", "data_hash", "args", "step", "ema"}
        if not needed <= checkpoint.keys():
            raise ValueError("parts are missing")
    return checkpoint


def build(checkpoint, device):
    """The trained model (the EMA weights) and its tokenizer. Raises UserError."""
    with explained("the checkpoint is damaged: its parts do not fit together", Exception):
        model = MODELS[checkpoint["model"]](tadm.Config(**checkpoint["config"]))
        model.load_state_dict(checkpoint["ema"])
        finite = all(x.isfinite().all() for x in model.parameters())
        if not finite or len(checkpoint["vocab"]) != model.config.vocab_size:
            raise ValueError("numbers or words are broken")
        return model.to(device).eval(), Tokenizer(checkpoint["vocab"])


# --------------------------------------------------------------------- 8. errors and output


class UserError(Exception):
    """Something the user can mend: shown as one line, exit code 2."""


def fail(message):
    raise UserError(message)


@contextlib.contextmanager
def explained(message, *kinds):
    """Exceptions of these kinds become one line: the message, and the reason in brackets."""
    try:
        yield
    except UserError:
        raise
    except kinds as e:
        reason = getattr(e, "strerror", None) or f"{e}" or type(e).__name__
        reason = " ".join(reason.split()).split(". ")[0]  # torch goes on with odd advice
        raise UserError(f"{message} ({reason[:200]})") from None


def run(argv):
    argv = sys.argv[1:] if argv is None else argv
    args, checkpoint, base = settings(parse(argv))
    with explained(f"--out {args.out} cannot be written: choose another", OSError):
        os.makedirs(args.out, exist_ok=True)
        tempfile.TemporaryFile(dir=args.out).close()
    device = pick_device(args.device)
    try:
        if args.data == "tinystories":
            download(**TINYSTORIES)
    except UserError as e:
        if checkpoint or base:
            raise
        print(f"{e}: training on the built-in stories instead", file=sys.stderr)
        return run([*argv, "--data", "stories"])
    x_train, x_val, tokenizer = load_data(args, checkpoint or base)
    x_train, x_val = x_train.to(device), x_val.to(device)
    model = train(args, checkpoint, base, x_train, x_val, tokenizer)
    if model is None:
        return 130
    with autocast(args, device):
        report(model, x_val, tokenizer, args)
    return 0


class Output:
    """stdout or stderr. What cannot be written is lost, and the run goes on."""

    def __init__(self, stream):
        self.stream, self.lost = stream or os.fdopen(nowhere(), "w"), False

    def __getattr__(self, name):
        return getattr(self.stream, name)

    def write(self, text):
        try:
            self.stream.write(text)
            self.stream.flush()
        except OSError:
            self.lost = True
            os.dup2(nowhere(), self.stream.fileno())


def nowhere():
    return os.open(os.devnull, os.O_WRONLY)


def shielded(run, program, argv=None):
    """Call run(argv). Returns the exit code: 2 after a UserError, 130 after Ctrl-C."""
    out, err, error = Output(sys.stdout), Output(sys.stderr), None
    if hasattr(out, "reconfigure"):
        out.reconfigure(errors="replace")  # consoles that cannot print a character
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = run(argv)
        except UserError as e:
            code, error = 2, str(e)
        except (MemoryError, RuntimeError) as e:
            if not isinstance(e, MemoryError) and "alloc" not in str(e):
                raise
            code, error = 2, "out of memory: make the batch, the model or --num smaller"
        except KeyboardInterrupt:
            code, error = 130, "stopped"
        if error:
            print(f"{program}: {' '.join(error.split())}", file=sys.stderr)
    return code or int(out.lost or err.lost)


def main(argv=None):
    return shielded(run, "train_toy.py", argv)


if __name__ == "__main__":
    sys.exit(main())
