"""Train a toy TADM, ADLM, MDLM or uniform-state model on TinyStories, the built-in stories or a
text file of your own, or give a trained MDLM or uniform-state model an anchor cache afterwards.

    python train_toy.py                     # TinyStories (one download of 22 MB), 2-core laptop CPU
    python train_toy.py --data stories      # the built-in stories, no network, minutes
    python train_toy.py --resume            # go on with out/tadm.pt where it stopped
    python train_toy.py --posttrain out/mdlm.pt     # train a fusion on a trained --model mdlm

The method is in tadm.py. Here are the stories, the tokens, the training loop and the report, then
the plumbing: options, files, errors. Left out: several GPUs, packing of stories, gradient
accumulation, a learned tokenizer.
"""

import argparse
import contextlib
import copy
import functools
import hashlib
import io
import math
import os
import random
import re
import shlex
import signal
import socket
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch
from tqdm import tqdm

import tadm

N_STORIES = 50_000
FORMAT = "tadm-toy checkpoint 3"
END = "<|endoftext|>"  # one token: fills a canvas up, and separates the stories of a text file
MODELS = {"tadm": tadm.TADM, "adlm": tadm.ADLM, "mdlm": tadm.MDLM, "uniform": tadm.UniformLM}


def make_model(name, config):
    """name: of MODELS; or posttrained_mdlm, posttrained_uniform, whose 6 + 2 layers are split into
    3 shared ones, 3 of the anchor and 2 of the denoiser."""
    model = MODELS[name.removeprefix("posttrained_")](config)
    if name in MODELS:
        return model
    rank = 4 * (5 * config.d_model // 32 or 1)  # 40 for d = 64
    return tadm.PostTrained(model, config.n_anchor // 2, config.n_denoiser, rank)


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


def check_story(text):
    """Whether the tables can write this text; how many of its sentences are valid, and how many it
    has. Valid: a template of STORY can write it with the facts first mentioned in the text."""
    text = in_capitals(text)
    sentences = re.findall(r"[^.]+\.?|\.", text)
    valid = [any(re.fullmatch(pattern(t), s) for t in STORY) for s in sentences]
    return bool(re.fullmatch(pattern("".join(STORY)), text)), sum(valid), len(valid)

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
            words.update(PIECE.findall(story)[:limit])
            chars.update(story)
        vocab = [END, *sorted(chars)]
        if len(vocab) > vocab_size:
            fail(f"the text has {len(vocab) - 1} different characters: use "
                 f"--vocab-size {2 * len(vocab)} or more")
        # a word that occurs once is spelled: there is nothing to learn it from
        longer = [word for word, n in words.most_common() if n > 1 and len(word) > 1]
        return cls(vocab + longer[: vocab_size - len(vocab)])

    def encode(self, text):
        """List of ids. Raises UserError for a character without a token."""
        pieces = PIECE.findall(text)
        try:
            return [self.ids[t] for p in pieces for t in ([p] if p in self.ids else p)]
        except KeyError as e:
            fail(f"the character {e.args[0]!r} does not occur in the training text, so the model "
                 "has no token for it: leave it out")

    def decode(self, ids):
        """The text of a list of ids, up to the first end token."""
        return "".join(self.vocab[i] for i in ids).partition(END)[0]


# ----------------------------------------------------------------------------- 3. data


def load_data(args, trained=None):
    """Returns the canvases to train on and to validate on, (N, L) int64, the Tokenizer, and a hash
    of them all. A canvas holds one story from its beginning, cut or filled up with the end token.
    One story in 20 validates. Raises UserError if the checkpoint `trained` was trained on others,
    wherever they lie now."""
    L = args.seq_len
    if args.data == "stories":
        if L < STORIES["seq_len"]:
            fail(f"the built-in stories need --seq-len {STORIES['seq_len']} or more")
        rng = random.Random(0)
        stories = [write_story(rng) for _ in tqdm(range(N_STORIES), "writing stories", leave=False)]
    elif args.data == "tinystories":
        stories = read_stories(download())[1:]  # the file begins mid-story
    else:
        stories = read_stories(args.data)
    train, val = [story for i, story in enumerate(stories) if i % 20], stories[::20]
    tokenizer = Tokenizer.train(train, args.vocab_size, L)
    # characters that the training text does not have are left out of the validation text
    val = ["".join(c for c in story if c in tokenizer.ids) for story in val]
    canvases = []
    for part in (train, val):
        rows = [tokenizer.encode(story)[:L] for story in tqdm(part, "encoding", leave=False)]
        rows = [row + [0] * (L - len(row)) for row in rows if row]  # 0 is the end token
        if not rows:
            fail(f"{args.data} is too short: it needs two stories, with {END} or an empty line "
                 "between them")
        canvases.append(torch.tensor(rows))
    ids = torch.cat(canvases).numpy().tobytes()
    data_hash = hashlib.sha256(ascii(tokenizer.vocab).encode() + ids).hexdigest()
    if trained and trained["data_hash"] != data_hash:
        fail(f"the data {args.data} is not what the checkpoint was trained on")
    return *canvases, tokenizer, data_hash


# ------------------------------------------------------------------------------ 4. training


class Muon(torch.optim.Optimizer):
    """Momentum whose update of each matrix is made orthogonal (Jordan et al., 2024).

    The step of a matrix (m, n) is lr * 7 * sqrt(max(1, m / n)) times U V^T, where U S V^T is the
    singular value decomposition of its momentum. The 7 lets it share AdamW's learning rate.
    torch.optim.Muon works in bfloat16, which many CPUs only emulate: 7 times slower on ours.
    """

    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            mean = self.state[p].setdefault("momentum", torch.zeros_like(p))
            mean.lerp_(p.grad, 1 - 0.95)
            ahead = p.grad.lerp(mean, 0.95)  # Nesterov
            size = self.param_groups[0]["lr"] * 7 * max(1, p.shape[0] / p.shape[1]) ** 0.5
            p.sub_(size * orthogonal(ahead))


def orthogonal(x, steps=5):
    """x (m, n) with all singular values brought near 1 (0.7 to 1.2), by Newton-Schulz steps: an
    odd polynomial of the matrix is the same polynomial of its singular values."""
    if x.shape[0] > x.shape[1]:
        return orthogonal(x.mT, steps).mT
    x = x / (x.norm() + 1e-7)
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
    return [Muon(matrices, {"lr": 0.0}), adamw]


# Eq. 14 with lambda = 1 learns less here. The tokens revealed in a rollout are not those of x, so
# the likeliest clean tokens are what a model without them would say: naive reuse. See README.
KD_WEIGHT = 100.0
UNIFORM_STEPS = 48  # of Algorithm 2, as in the paper


def training_loss(model, x, args, step, g):
    """What this kind of model learns from the clean canvases x (B, L): nats per token."""
    L = x.shape[1]
    if hasattr(model, "base"):
        steps = max(3, L // 4 if step % 2 else L // 8)  # 3 or more: ages are 0, 1 and 2
        steps = UNIFORM_STEPS if model.mask_id is None else steps
        return tadm.posttrain_loss(model, model.base, x, steps, kd_weight=KD_WEIGHT, generator=g)
    if model.mask_id is None:
        return tadm.uniform_loss(model, x, g)
    # Staleness as in C.2: K in {1, 2, 4, 8}, T from L/8 to 4L.
    refresh_choices = [1, 2, 4, 8] if args.anchors == "stale" else [1]
    steps_choices = [max(1, L * 2**i // 8) for i in range(6)]
    t, t_stale = tadm.sample_times(len(x), refresh_choices, steps_choices, g, x.device)
    return tadm.t_anelbo(model, x, t, t_stale, args.gamma, g)


def train(args, checkpoint, path, x_train, x_val, tokenizer, data_hash):
    """Train and write checkpoints to path. Returns the EMA model, or None after Ctrl-C.
    checkpoint: what to resume, or to post-train, or None."""
    device = x_train.device
    torch.manual_seed(args.seed)
    with explained("these sizes do not fit", ValueError):
        config = tadm.Config(len(tokenizer.vocab), args.seq_len, args.d_model, args.n_heads,
                             args.n_anchor, args.n_denoiser)
        model = make_model(args.model, config).to(device)
    with explained(f"--out {args.out} cannot be written: choose another", OSError):
        os.makedirs(args.out, exist_ok=True)
        tempfile.TemporaryFile(dir=args.out).close()
    if args.posttrain:
        model.base.load_state_dict(checkpoint["ema"])
    # An average over the last steps is less noisy than the weights: it is evaluated and sampled.
    ema = copy.deepcopy(model).eval()
    optimizers = make_optimizers(model)
    start = 0
    if args.resume:
        start = checkpoint["step"]
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
    every, stops, smooth, saved = max(1, args.steps // 10), [], None, start

    with contextlib.ExitStack() as undo, tqdm(total=args.steps, initial=start, unit="step") as bar:
        for number in (signal.SIGINT, signal.SIGTERM):  # the loop ends where it can save
            before = signal.signal(number, lambda *_: stops.append(1))
            undo.callback(signal.signal, number, before)
        for step in range(start + 1, args.steps + 1):
            # The randomness of a step is a function of (seed, step) alone: a resumed run sees the
            # same noise, and an evaluation in between cannot disturb it.
            g = step_generator(args.seed, step, device)
            rows = torch.randint(len(x_train), (args.batch_size,), generator=g, device=device)
            with torch.autocast(device.type, torch.bfloat16, enabled=args.dtype == "bfloat16"):
                loss = training_loss(model, x_train[rows], args, step, g)

            # The weight 1/t makes some gradients huge: one batch must not undo the others' work.
            model.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)

            # Warm up while the optimizers' averages are young, then go down to 0 in a line.
            warmup = min(1.0, step / min(100, args.steps))
            for optimizer in optimizers:
                optimizer.param_groups[0]["lr"] = args.lr * warmup * (1 - (step - 1) / args.steps)
                optimizer.step()
            with torch.no_grad():
                keep = min(0.99, step / (step + 9))  # a young average forgets faster
                torch._foreach_lerp_(list(ema.parameters()), list(model.parameters()), 1 - keep)

            # The average is evaluated on the same 128 canvases each time. A step may break the
            # weights after a good loss: nothing broken is ever saved.
            due = step % every == 0 or step == args.steps or stops
            nats = evaluate(ema, x_val[:128], None, 1, g, draws=4).mean() if due else loss
            if not (loss + nats).isfinite():
                fail(f"the loss is not finite at step {step}: try a smaller --lr or --gamma; "
                     + (f"{path} holds step {saved}" if saved else "nothing was saved"))

            # One batch says little, as its times are random: show an average.
            smooth = loss.item() if smooth is None else 0.98 * smooth + 0.02 * loss.item()
            bar.set_postfix_str(f"loss {smooth:.3f} nats/token", False)
            bar.update()
            if not due:
                continue

            # All that the next step depends on: a resumed run ends with the very same weights.
            state = {
                "format": FORMAT, "config": vars(config), "args": vars(args), "step": step,
                "vocab": tokenizer.vocab, "data_hash": data_hash,
                "weights": model.state_dict(), "ema": ema.state_dict(),
                "optimizers": [optimizer.state_dict() for optimizer in optimizers],
            }
            if not saved:
                must_not_exist(path)  # another run may have come first
            write_file(path, "--out", functools.partial(torch.save, state))
            saved = step

            # A text says more than a number.
            z, _ = generate(ema, 1, args.seq_len, 4, g)
            text = tokenizer.decode(z[0].tolist()).replace("\n", " ")
            tqdm.write(f"step {step}: bound {nats:.3f} nats/token | {text[:100]}")
            if stops:
                command = shlex.join(["python", "train_toy.py", "--resume", str(path)])
                tqdm.write(f"stopped at step {step}, all saved; to go on: {command}")
                return None
    return ema


def step_generator(seed, step, device):
    return torch.Generator(device).manual_seed((seed * 1_000_003 + step) % 2**63)


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
    stories, valid, sentences = map(sum, zip(*map(check_story, texts)))
    return {"stories": stories / len(texts), "sentences": valid / max(1, sentences)}


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


def measure(model, x, steps, refresh_every, num, depth, teacher=None, **spacing):
    """One row of a table, and the canvases z (num, L) that were sampled for it, always with the
    same noise. Layer calls are per step, relative to a model of that depth."""
    noise = [step_generator(0, i, x.device) for i in range(3)]
    policy = (steps, refresh_every)
    row = {"bound": float(evaluate(model, x, *policy, noise[0], **spacing).mean())}
    if teacher is not None:
        kl = evaluate(model, x, *policy, noise[1], teacher=teacher, **spacing)
        row["KL"] = float(kl.mean())
    begin = time.perf_counter()
    z, stats = generate(model, num, *policy, noise[2], **spacing)
    speed = z.numel() / max(time.perf_counter() - begin, 1e-9)  # clocks may tick late
    layers, fused = stats["layer_calls"], stats["denoiser_calls"] * fusion_share(model)
    row["layers"], row["+ fusion"] = layers / steps / depth, (layers + fused) / steps / depth
    return row | {"tokens/s": speed}, z


def show(title, table):
    """Print rows of strings, the first one the head, as a Markdown table."""
    width = [max(2, *map(len, column)) for column in zip(*table)]
    line = ["-" * width[0], *("-" * (w - 1) + ":" for w in width[1:])]
    print(f"\n{title}\n")
    for row in (table[0], line, *table[1:]):
        cells = [row[0].ljust(width[0]), *(c.rjust(w) for c, w in zip(row[1:], width[1:]))]
        print(f"| {' | '.join(cells)} |")


FORMATS = {"bound": ".4f", "KL": ".4f", "layers": ".2f", "+ fusion": ".2f", "tokens/s": ",.0f",
           "stories": ".0%", "sentences": ".0%"}


def report(model, x_val, tokenizer, args, path):
    """Print the bound, the closing table, samples and the command to try next."""
    L, x = args.seq_len, x_val[:512]
    nats = evaluate(model, x, None, 1, step_generator(0, 0, x.device))
    characters = sum(len(tokenizer.decode(row)) for row in x.tolist())
    print(f"\nbound on {len(x)} validation canvases, T -> infinity, fresh anchors: "
          f"{nats.mean():.4f} +- {nats.std(correction=0) / math.sqrt(len(x)):.4f} nats/token, "
          f"{nats.sum() * L / max(1, characters):.4f} nats/character")
    stories = args.data == "stories"
    if stories:
        print(f"true entropy of the built-in stories: {story_entropy() / L:.4f} nats/token")

    # What the rows are about. depth: of the single-stage model that layer calls are relative to.
    steps, depth, teacher = 2 * L, args.n_anchor or args.n_denoiser, None
    rows = [(args.model, model, K) for K in ((1, 2, 4, 8) if model.depths[0] else (1,))]
    if hasattr(model, "base"):
        steps, depth, teacher = L, args.n_anchor + args.n_denoiser, model.base
        kinds = {"naive": without_fusion(model), "fused": model}
        rows = [(name, kinds[name], K) for K in (1, 2, 3, 4, 8) for name in kinds]
        rows.insert(0, ("teacher", teacher, 1))
    steps = UNIFORM_STEPS if model.mask_id is None else steps
    num, table = 64 if stories else 16, []  # of other texts only the speed is told
    for name, m, K in tqdm(rows, "measuring", leave=False):
        row, z = measure(m, x[:256], steps, K, num, depth, teacher)
        row |= valid_shares(z, tokenizer) if stories else {}
        table.append([name, str(K), *(f"{row[key]:{FORMATS[key]}}" for key in row)])
    show(f"T = {steps} reverse steps, anchor refreshed every K steps; {num} canvases sampled "
         "together", [["model", "K", *row], *table])
    print("\nbound: nats/token, the same noise in every row. layers: layer calls per step, relative"
          f"\nto a single-stage model of {depth} layers; + fusion: its multiply-adds counted as "
          "well.\n")
    for canvas in z[:2].tolist():
        print(f"sample (K = {K}): {tokenizer.decode(canvas)}\n")
    print(f"now try: python sample.py {shlex.quote(str(path))} --watch")


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
SIZES = ("model", "preset", "seq_len", "vocab_size", "d_model", "n_heads", "n_anchor", "n_denoiser")


def number(kind, low, high=10**9):
    """An argparse type: a number of that kind in [low, high]."""

    def convert(text):
        if not low <= kind(text) <= high:
            raise argparse.ArgumentTypeError(f"{text} is not in [{low}, {high}]")
        return kind(text)

    convert.__name__ = kind.__name__  # for argparse's own message
    return convert


def parse(argv):
    """All options, and the checkpoint that --resume or --posttrain names, or None."""
    parser = argparse.ArgumentParser(
        description="Train a toy time-anchored diffusion language model and report how it does.",
        epilog="These are the defaults of --preset cpu; the built-in stories have --seq-len 62 "
               "--steps 2000, and a checkpoint that is named brings its own.",
    )
    parser.error = fail
    parser.set_defaults(**PRESETS["cpu"])
    add, count = parser.add_argument, number(int, 1)
    add("--model", choices=MODELS, default="tadm",
        help="tadm (default), its predecessors adlm, mdlm, or uniform: without a mask token")
    one_of = parser.add_mutually_exclusive_group().add_argument
    one_of("--resume", nargs="?", const="out/tadm.pt", metavar="CKPT",
           help="go on with this checkpoint (default out/tadm.pt) where it stopped")
    one_of("--posttrain", metavar="CKPT", help="give this mdlm or uniform an anchor cache")
    add("--data", default="tinystories",
        help="tinystories (default, one download), stories (built in), or a text file")
    add("--preset", choices=PRESETS, default="cpu",
        help="sizes for a 2-core cpu (default) or for an 8 GB gpu")
    add("--steps", type=count, help="training steps (default %(default)s)")
    add("--batch-size", type=count, help="canvases per step (default %(default)s)")
    add("--lr", type=number(float, 1e-9, 1e30), help="peak learning rate (default %(default)s)")
    add("--anchors", choices=("stale", "fresh"),
        help="in training (default: stale for tadm, fresh for adlm as its authors do)")
    add("--gamma", type=number(float, 0), default=0.0,
        help="weight of the anchor's supervision (default %(default)s)")
    add("--seq-len", type=count, help="canvas length L, in tokens (default %(default)s)")
    add("--vocab-size", type=count, help="at most this many tokens V (default %(default)s)")
    add("--d-model", type=count, help="width d (default %(default)s)")
    add("--n-heads", type=count, help="attention heads (default %(default)s)")
    add("--n-anchor", type=number(int, 0), help="anchor layers (default %(default)s)")
    add("--n-denoiser", type=number(int, 0), help="denoiser layers (default %(default)s)")
    add("--seed", type=number(int, 0, 2**63 - 1), default=0, help="default 0")
    add("--device", default="auto", help="auto (a GPU, else the cpu) or a name of torch's")
    add("--dtype", choices=("float32", "bfloat16"),
        help="of the matrix products (default %(default)s)")
    add("--out", default="out", help="folder for the new checkpoint, MODEL.pt (default out)")

    # What is not given comes from the preset, or from a checkpoint; that one's sizes are fixed.
    args, checkpoint, fixed = parser.parse_args(argv), None, ()
    known = PRESETS[args.preset] | (STORIES if args.data == "stories" else {})
    source = args.resume or args.posttrain
    if source:
        checkpoint = load_checkpoint(source)
        fixed = (*SIZES, "out") if args.resume else SIZES
        known = checkpoint["args"] | {"resume": args.resume, "posttrain": args.posttrain,
                                      "out": str(Path(source).parent)}
    if args.posttrain:
        if known["model"] not in ("mdlm", "uniform"):
            fail(f"--posttrain needs a --model mdlm or uniform, {source} is a {known['model']}")
        known |= POSTTRAIN | {"model": f"posttrained_{known['model']}"}
    parser.set_defaults(**known)
    args = parser.parse_args(argv)
    for name in fixed:
        if getattr(args, name) != known[name]:
            fail(f"a run from {source} has {flag(name)} {known[name]}: leave that option out")
    if args.model not in ("tadm", "adlm") and (args.gamma or args.anchors):
        fail("--gamma and --anchors have an effect on tadm and adlm only: leave them out")
    args.anchors = args.anchors or {"tadm": "stale", "adlm": "fresh"}.get(args.model)
    return args, checkpoint


def flag(name):
    return f"--{name.replace('_', '-')}"


def pick_device(name):
    """A torch.device that works here. Raises UserError."""
    if name == "auto":
        accelerator = torch.accelerator.is_available() and torch.accelerator.current_accelerator()
        name = accelerator.type if accelerator else "cpu"
        print(f"device: {name}")
    with explained(f"--device {name} cannot be used here: try --device cpu", Exception):
        torch.zeros(1, device=name).item()
        return torch.device(name)


# -------------------------------------------------------------------------------- 7. files

TINYSTORIES = {
    "url": "https://huggingface.co/datasets/roneneldan/TinyStories/resolve/main/"
    "TinyStoriesV2-GPT4-valid.txt",
    "hash_prefix": "6874bae9a4c1a4e7edcf0e53b86c17817e9cf881fc75ff2368da457b80c0585d",
}


def download():
    """The path of TinyStories in the user's cache, fetched if it is not there. Raises UserError."""
    with explained("TinyStories could not be downloaded", Exception):  # from no network to no home
        cache = os.environ.get("XDG_CACHE_HOME", "")  # by the standard, a relative one is none
        cache = Path(cache) if os.path.isabs(cache) else Path.home() / ".cache"
        path = cache / "tadm-toy" / TINYSTORIES["url"].rpartition("/")[2]
        if not path.is_file():
            path.parent.mkdir(parents=True, exist_ok=True)
            socket.setdefaulttimeout(10)
            torch.hub.download_url_to_file(dst=str(path), **TINYSTORIES)  # checked, then renamed
        return path


def read_stories(path):
    """The stories of a UTF-8 text file; its paragraphs, where there are no separators."""
    with explained(f"cannot read the data file {path}", OSError, UnicodeDecodeError):
        text = Path(path).read_text(encoding="utf-8-sig")
    stories = text.split(END) if END in text else re.split(r"\n\s*\n", text)
    stories = [story.strip() for story in stories]
    return list(dict.fromkeys(filter(None, stories)))  # no story twice, or in both splits


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


def must_not_exist(path):
    if path.exists():
        fail(f"{path} exists: go on with it by --resume {shlex.quote(str(path))}, or choose "
             "another --out")


def load_checkpoint(path):
    """The dict that train() saved: plain types and tensors. Raises UserError."""
    if not os.path.isfile(path):
        fail(f"there is no checkpoint {path}: train one with python train_toy.py")
    message = f"{path} is not a checkpoint of this project, or of another version of it"
    with explained(message, Exception):  # torch raises all kinds
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        parts = {"config", "args", "step", "vocab", "data_hash", "ema"}
        if checkpoint["format"] != FORMAT or parts - checkpoint.keys():
            raise ValueError("another format")
    return checkpoint


def build(checkpoint, device):
    """The trained model (the EMA weights) and its tokenizer. Raises UserError."""
    with explained("the checkpoint is damaged: its parts do not fit together", Exception):
        model = make_model(checkpoint["args"]["model"], tadm.Config(**checkpoint["config"]))
        model.load_state_dict(checkpoint["ema"])
        if not all(p.isfinite().all() for p in model.parameters()):
            raise ValueError("weights that are not finite")
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
    args, checkpoint = parse(argv)
    path = Path(args.resume or f"{args.out}/{args.model}.pt")
    if not args.resume:
        must_not_exist(path)
    device = pick_device(args.device)
    try:
        if args.data == "tinystories":
            download()
    except UserError as e:
        if checkpoint:
            raise
        print(f"{e}: training on the built-in stories instead", file=sys.stderr)
        args, _ = parse([*argv, "--data", "stories"])
    x_train, x_val, tokenizer, data_hash = load_data(args, checkpoint)
    x_train, x_val = x_train.to(device), x_val.to(device)
    model = train(args, checkpoint, path, x_train, x_val, tokenizer, data_hash)
    if model is None:
        return 130
    print(f"saved {path}; measuring it")
    report(model, x_val, tokenizer, args, path)
    return 0


def shielded(run, program, argv=None):
    """Call run(argv). Returns the exit code: 2 after a UserError, 130 after Ctrl-C."""
    sys.stdout, sys.stderr = sys.stdout or io.StringIO(), sys.stderr or io.StringIO()  # closed
    with contextlib.suppress(AttributeError):
        sys.stdout.reconfigure(errors="replace")  # consoles that cannot print a character
    try:
        code = run(sys.argv[1:] if argv is None else argv)
        sys.stdout.flush()
        return code or 0
    except UserError as e:
        code, error = 2, str(e)
    except (MemoryError, RuntimeError) as e:
        if "alloc" not in str(e):
            raise
        code, error = 2, "out of memory: make the batch, the model or --num smaller"
    except OSError as e:  # a full disk, or a reader who has gone: do not fail again at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code, error = 1, f"cannot print ({e.strerror})"
    except KeyboardInterrupt:
        code, error = 130, "stopped"
    print(f"{program}: {' '.join(error.split())}", file=sys.stderr)
    return code


main = functools.partial(shielded, run, "train_toy.py")

if __name__ == "__main__":
    sys.exit(main())
