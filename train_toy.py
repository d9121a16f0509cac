"""Train a toy TADM, ADLM or MDLM on TinyStories, the built-in stories or a text file of your own,
or give a trained MDLM an anchor cache afterwards.

    python train_toy.py                     # TinyStories (one download of 22 MB), 2-core laptop CPU
    python train_toy.py --data stories      # the built-in stories, no network, minutes
    python train_toy.py --resume            # continue an interrupted run
    python train_toy.py --posttrain out/mdlm.pt     # train the fusion only, on a trained --model mdlm

The method is in tadm.py; here are the data, the training loop, the checkpoint and the report.
Left out: several GPUs, packing of stories, gradient accumulation, a learned tokenizer.
"""

import argparse
import contextlib
import copy
import dataclasses
import functools
import hashlib
import http.client
import itertools
import math
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
import warnings
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

import tadm

N_STORIES = 50_000
FORMAT = "tadm-toy checkpoint 2"
END = "<|endoftext|>"  # one token: fills a canvas up, and separates the stories of a text file


class UserError(Exception):
    """Something the user can mend: shown as one line, exit code 2."""


class DownloadError(UserError):
    """No network, or not the expected file."""


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
        raise UserError(f"{message} ({' '.join(reason.split())[:200]})") from None


def posttrained(config, naive=False):
    """An MDLM of 6 + 2 layers is split into 1 shared one, 5 of the anchor and 2 of the denoiser."""
    rank = 4 * (5 * config.d_model // 32 or 1)  # 40 for d = 64
    return tadm.PostTrained(tadm.MDLM(config), 1, config.n_denoiser, rank, naive=naive)


MODELS = {"tadm": tadm.TADM, "adlm": tadm.ADLM, "mdlm": tadm.MDLM, "posttrained": posttrained}


# ----------------------------------------------------------------- 1. the built-in stories
# [Words] are missing in half of the stories, {slots} are drawn anew each time, and CAPITALS are
# facts: drawn once per story, so that its sentences agree on them. Each fact is told by a sentence
# that is never missing, so no two ways of drawing give the same text.

STORY = [
    "{opening}, CHILD and FRIEND {went} to the PLACE.",
    " {who} had a[ {size}] COLOUR THING.",
    "[ The[ COLOUR] THING was[ very] {nice}.]",
    "[ At the PLACE] {who} {saw} a[ {size}] ANIMAL.",
    " The ANIMAL took the[ COLOUR] THING[ and ran away].",
    "[ {who} was[ very] {sad}.]",
    " {who} {found} the[ COLOUR] THING under a {tree}.",
    "[ {they} played[ at the PLACE].]",
]
FACTS = {
    "CHILD FRIEND": ["Tom", "Mia", "Ben", "Lily", "Sam", "Anna"],  # two different ones
    "PLACE": ["park", "farm", "beach", "zoo", "lake", "forest"],
    "COLOUR": ["red", "blue", "green", "pink", "white", "brown"],
    "THING": ["ball", "kite", "boat", "book", "cup", "hat"],
    "ANIMAL": ["dog", "cat", "fox", "duck", "goat", "monkey"],
}
SLOTS = {
    "opening": ["Once", "One day", "One fine day"],
    "went": ["went", "ran"],
    "who": ["CHILD", "FRIEND"],
    "they": ["They", "CHILD and FRIEND"],
    "size": ["big", "little"],
    "nice": ["nice", "old", "new"],
    "saw": ["saw", "met"],
    "sad": ["sad", "angry"],
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
    nats, p = 0.0, 1.0  # p: the probability that this place of STORY is written
    for kinds, words in FACTS.items():
        nats += math.log(math.perm(len(words), len(kinds.split())))
    for mark in re.findall(r"[][]|\{\w+\}", "".join(STORY)):
        if mark == "[":
            nats += p * math.log(2)
            p /= 2
        elif mark == "]":
            p *= 2
        else:
            nats += p * math.log(len(SLOTS[mark[1:-1]]))
    return nats


@functools.cache
def pattern(template):
    """A template as a regular expression, for texts with their facts in capitals."""
    for mark, code in {".": r"\.", "[": "(?:", "]": ")?"}.items():
        template = template.replace(mark, code)
    return re.compile(re.sub(r"\{(\w+)\}", lambda m: f"(?:{'|'.join(SLOTS[m[1]])})", template))


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
    return bool(pattern("".join(STORY)).fullmatch(in_capitals(text)))


def valid_sentences(text):
    """(number of valid sentences, number of sentences). Valid: a template of STORY can write it
    with the facts first mentioned in the text."""
    sentences = re.findall(r"[^.]+\.?|\.", in_capitals(text))
    valid = [any(pattern(t).fullmatch(s) for t in STORY) for s in sentences]
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
            raise UserError(f"the text has {len(vocab) - 1} different characters: use "
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

TINYSTORIES = {
    "url": "https://huggingface.co/datasets/roneneldan/TinyStories/resolve/main/"
    "TinyStoriesV2-GPT4-valid.txt",
    "size": 22_502_601,
    "sha256": "6874bae9a4c1a4e7edcf0e53b86c17817e9cf881fc75ff2368da457b80c0585d",
}


def digest(path):
    """The sha256 of a file, or None if it cannot be read."""
    with contextlib.suppress(OSError):
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def cache_folder():
    """By the XDG standard, an empty or relative path counts as unset. Raises DownloadError."""
    for folder in (os.environ.get("XDG_CACHE_HOME", ""), os.path.expanduser("~/.cache")):
        if os.path.isabs(folder):
            return Path(folder) / "tadm-toy"
    raise DownloadError("TinyStories could not be downloaded (no home folder to keep it in)")


def temporary_folder(path):
    """A folder beside path, no other run's, that is removed again whatever happens in between."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return tempfile.TemporaryDirectory(".part", dir=path.parent, ignore_cleanup_errors=True)


def download(url, size, sha256, folder, timeout=10):
    """Fetch url into folder unless it is there already, checked either way. Raises DownloadError."""
    path = folder / url.rpartition("/")[2]
    if digest(path) == sha256:
        return path
    try:
        with temporary_folder(path) as temporary:
            part = Path(temporary) / path.name
            with (
                urllib.request.urlopen(url, timeout=timeout) as answer,
                open(part, "wb") as file,
                tqdm(total=size, unit="B", unit_scale=True, desc="downloading TinyStories") as bar,
            ):
                while chunk := answer.read(1 << 16):
                    file.write(chunk)
                    bar.update(len(chunk))
            if digest(part) != sha256:
                raise ValueError(f"{part.stat().st_size:,} bytes from {url} are not the expected file")
            part.replace(path)
    except (OSError, ValueError, http.client.HTTPException) as e:  # no network, disk full, bad address
        if digest(path) != sha256:  # unless another run has fetched it meanwhile
            reason = getattr(e, "reason", e)
            raise DownloadError(f"TinyStories could not be downloaded ({reason})") from None
    return path


def read_stories(path):
    """The stories of a UTF-8 text file, or its whole text where there are no separators."""
    text = "\0"
    with (
        explained(f"cannot read the data file {path}", OSError),
        contextlib.suppress(UnicodeDecodeError),
    ):
        text = Path(path).read_text(encoding="utf-8-sig")
    if "\0" in text:
        raise UserError(f"the data file {path} is not UTF-8 text")
    stories = [s.strip() for s in text.split(END)]
    return list(dict.fromkeys(s for s in stories if s))  # no story twice, or in both splits


def load_data(args, trained=None):
    """Returns (training canvases, validation canvases, Tokenizer). One story in 20 validates.

    trained: a checkpoint that was trained on the same canvases. Raises UserError if it was not.
    """
    if args.data == "stories":
        rng = random.Random(0)
        stories = [write_story(rng) for _ in tqdm(range(N_STORIES), "writing stories", leave=False)]
        longest = max(len(PIECE.findall(story)) for story in stories)
        args.seq_len = args.seq_len or longest
        if args.seq_len < longest:
            raise UserError(f"the built-in stories need --seq-len {longest} or more")
    elif args.data == "tinystories":
        stories = read_stories(download(**TINYSTORIES, folder=cache_folder()))[1:]  # begins mid-story
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
        raise UserError(f"the data file {args.data} is too short: it needs two stories, or more than "
                        f"{L} tokens, as one canvas validates")
    x = np.zeros((len(rows), L), dtype=np.int64)  # 0 is the end token
    for i, row in enumerate(rows):
        x[i, : len(row)] = row
    x = torch.from_numpy(x)
    data = x[:n_train], x[n_train:], tokenizer
    if trained and trained.get("data_hash") != fingerprint(*data):
        raise UserError(f"the data {args.data} is not what the checkpoint was trained on")
    return data


def fingerprint(x_train, x_val, tokenizer):
    """By this hash a checkpoint knows its data again, wherever it lies now."""
    ids = torch.cat([x_train, x_val]).cpu().numpy()
    return hashlib.sha256(ascii(tokenizer.vocab).encode() + ids.tobytes()).hexdigest()


# ------------------------------------------------------------------------------ 4. options

PRESETS = {  # for a 2-core CPU, and for one consumer GPU with 8 GB
    "cpu": {"seq_len": 96, "d_model": 64, "n_heads": 2, "n_anchor": 6, "n_denoiser": 2,
            "vocab_size": 4096, "batch_size": 32, "lr": 4e-3, "steps": 3500, "dtype": "float32"},
    "gpu": {"seq_len": 256, "d_model": 384, "n_heads": 6, "n_anchor": 6, "n_denoiser": 2,
            "vocab_size": 8192, "batch_size": 64, "lr": 1e-3, "steps": 20_000, "dtype": "bfloat16"},
}
STORIES = {"seq_len": None, "steps": 1600}  # the length is that of the longest story
# Eq. 14 with lambda = 1 learns less here. The tokens revealed in a rollout are not those of x, so the
# likeliest clean tokens are what a model that had not seen them would say: naive reuse. See README.
KD_WEIGHT = 100.0
POSTTRAIN = {"steps": 2000, "batch_size": 16, "lr": 5e-3, "model": "posttrained"}
DEFAULTS = {"model": "tadm", "data": "tinystories", "preset": "cpu", "gamma": 0.0, "seed": 0,
            "device": "auto", "compile": False, "out": "out", "resume": False}
FREE_TO_CHANGE = {"resume", "steps", "out", "device", "compile"}  # when a run is resumed
FILES = {"data", "posttrain"}  # may have moved: what is in them decides
NO_EFFECT = {"mdlm": {"anchors", "gamma"}, "posttrained": {
    "model", "preset", "seq_len", "vocab_size", "d_model", "n_heads", "n_anchor", "n_denoiser",
    "anchors", "gamma"}}


def number(kind, low, high=math.inf):
    """An argparse type: a finite number of that kind in [low, high]."""

    def convert(text):
        value = kind(text)
        if not low <= value <= high or value == math.inf:
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
    add, count = parser.add_argument, number(int, 1, 10**9)
    add("--model", choices=list(MODELS)[:3], help="tadm (default), or its predecessors adlm and mdlm")
    add("--posttrain", metavar="MDLM.pt", help="give this trained mdlm an anchor cache: train a fusion")
    add("--data", help="tinystories (default, one download), stories (built in), or a text file")
    add("--preset", choices=PRESETS, help="sizes for a 2-core cpu (default) or for an 8 GB gpu")
    add("--steps", type=count, help="training steps")
    add("--batch-size", type=count, help="canvases per step")
    add("--lr", type=number(float, 1e-9), help="peak learning rate")
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
    add("--compile", action="store_true", help="torch.compile the layers: slow start, faster steps")
    add("--out", help="folder for the checkpoint, MODEL.pt or posttrained.pt (default out)")
    add("--resume", action="store_true", help="go on with OUT/MODEL.pt where it stopped")
    return vars(parser.parse_args(argv))


def settings(given):
    """All options: the defaults, the preset, those of a checkpoint, and those given last.

    Returns (Namespace, checkpoint to resume or None, checkpoint to post-train or None). Raises
    UserError if a resumed run would change.
    """
    for name in FILES & given.keys():  # a full path, for a run resumed in another folder; not of a pipe
        if os.path.isfile(given[name]) and given[name] not in ("stories", "tinystories"):
            given[name] = os.path.realpath(given[name])
    args, checkpoint, base = DEFAULTS | PRESETS[given.get("preset", "cpu")], None, None
    model = "posttrained" if "posttrain" in given else given.get("model")
    for name in NO_EFFECT.get(model, set()) & given.keys():
        fail(f"--{name.replace('_', '-')} has no effect on a {model} model: leave it out")
    if "posttrain" in given:
        base = load_checkpoint(given["posttrain"])
        n_anchor = build(base, "cpu")[0].config.n_anchor
        if base["model"] != "mdlm" or n_anchor < 2:
            fail(f"--posttrain needs a --model mdlm of --n-anchor 2 or more, this is a "
                 f"{base['model']} of --n-anchor {n_anchor}")
        args |= {k: v for k, v in base["args"].items() if k not in FREE_TO_CHANGE} | POSTTRAIN
    elif given.get("data") == "stories":
        args |= STORIES
    args |= given
    args.setdefault("anchors", "fresh" if model == "adlm" else "stale")
    if args["resume"]:
        path = Path(args["out"]) / f"{args['model']}.pt"
        checkpoint = load_checkpoint(path)
        build(checkpoint, "cpu")  # all of its parts are there
        trained = checkpoint["args"]
        for name in given.keys() - FREE_TO_CHANGE - FILES:
            if given[name] != trained.get(name):
                fail(f"{path} was trained with --{name.replace('_', '-')} {trained.get(name)}: "
                     "to resume it, leave that option as it was")
        weights = checkpoint["ema"]
        if base and not all(v.equal(weights[f"base.{name}"]) for name, v in base["ema"].items()):
            fail(f"{path} was not made from {given['posttrain']}: has that been trained anew?")
        args |= trained | {"resume": True, "out": args["out"]} | given
    return argparse.Namespace(**args), checkpoint, base


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


# ---------------------------------------------------------------------------- 5. checkpoints


def checkpoint_path(args):
    """OUT/MODEL.pt, in a folder that can be written. Raises UserError."""
    path = Path(args.out) / f"{args.model}.pt"
    with explained(f"cannot write {path}: choose another --out", OSError):
        temporary_folder(path).cleanup()
        if path.is_dir():
            raise IsADirectoryError(f"{path} is a folder")
    return path


def write_file(path, option, write, place=lambda path: path):
    """Call write(another name), then rename that to place(path). Raises UserError."""
    path = Path(path)
    message = f"{option}: cannot write {path}: is it a folder, or the disk full?"
    with explained(message, OSError, RuntimeError), temporary_folder(path) as folder:
        part = Path(folder) / path.name
        write(part)
        part.replace(place(path))


def free(folder, stem="", suffix=""):
    """The first of FOLDER/STEM1SUFFIX, STEM2SUFFIX, ... that is not taken."""
    paths = (folder / f"{stem}{i}{suffix}" for i in itertools.count(1))
    return next(path for path in paths if not path.exists())


def load_checkpoint(path):
    """The dict that train() wrote: plain types and tensors. Raises UserError."""
    if not os.path.isfile(path):
        raise UserError(f"there is no checkpoint {path}: train one with python train_toy.py")
    message = f"{path} is not a checkpoint of this project, or of another version of it"
    with explained(message, Exception), warnings.catch_warnings():  # torch raises all kinds
        warnings.simplefilter("ignore")  # torch's remarks on files that are not its own
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        if checkpoint["format"] != FORMAT:
            raise ValueError("another format")
    return checkpoint


def build(checkpoint, device):
    """The trained model (the EMA weights) and its tokenizer. Raises UserError."""
    message = "the checkpoint is damaged: its parts are missing or do not fit together"
    with explained(message, Exception):
        model = MODELS[checkpoint["model"]](tadm.Config(**checkpoint["config"]))
        model.load_state_dict(checkpoint["ema"])
        tokenizer = Tokenizer(checkpoint["vocab"])
        needed = {"data", "model", "seq_len", "vocab_size"} - {*checkpoint["args"]}
        if needed or len(tokenizer.vocab) != model.mask_id or not finite(model):
            raise ValueError
    return model.to(device).eval(), tokenizer


def finite(model):
    return all(p.isfinite().all() for p in model.parameters())


# ------------------------------------------------------------------------------ 6. training


class Muon(torch.optim.Optimizer):
    """Momentum whose update of each matrix is made orthogonal (Jordan et al., 2024).

    The step of a matrix (m, n) is lr * scale * sqrt(max(1, m / n)) times U V^T, where U S V^T is the
    singular value decomposition of its momentum. The scale lets it share AdamW's learning rate.
    torch.optim.Muon takes one matrix after the other, in bfloat16, which many CPUs are slow at: a
    training step took 1.6 to 2.3 times as long with it, 1.05 to 1.12 times with this one.
    """

    def __init__(self, params, lr=0.0, momentum=0.95, weight_decay=0.0, scale=7.0):
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay,
                                  "scale": scale})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            shapes = defaultdict(list)
            for p in group["params"]:
                if p.grad is not None:
                    shapes[p.shape].append(p)
            for (m, n), matrices in shapes.items():
                for p in matrices:
                    self.state[p].setdefault("momentum", torch.zeros_like(p))
                grads, mean = [p.grad for p in matrices], [self.state[p]["momentum"] for p in matrices]
                torch._foreach_lerp_(mean, grads, 1 - group["momentum"])
                ahead = torch._foreach_lerp(grads, mean, group["momentum"])  # Nesterov
                size = group["lr"] * group["scale"] * max(1, m / n) ** 0.5
                torch._foreach_mul_(matrices, 1 - group["lr"] * group["weight_decay"])
                torch._foreach_sub_(matrices, (size * orthogonal(torch.stack(ahead))).unbind())


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


def train(args, checkpoint, base, x_train, x_val, tokenizer):
    """Train and write checkpoints. Returns the EMA model, or None if Ctrl-C ended the run.

    The randomness of step n is a function of (seed, n) alone: a resumed run sees the same noise,
    and an evaluation in between cannot disturb it. Raises UserError.
    """
    path, device = checkpoint_path(args), x_train.device
    torch.manual_seed(args.seed)
    config = sizes(args, len(tokenizer.vocab))
    model = MODELS[args.model](config).to(device)
    if base:
        model.base.load_state_dict(base["ema"])
    ema = copy.deepcopy(model).eval()
    optimizers = make_optimizers(model)
    data_hash = fingerprint(x_train, x_val, tokenizer)
    start, mine = 0, path.exists() and path.stat().st_mtime_ns
    if checkpoint:
        with explained(f"{path} is damaged: its parts are missing or do not fit", Exception):
            start = checkpoint["step"]
            model.load_state_dict(checkpoint["weights"])
            ema.load_state_dict(checkpoint["ema"])
            for optimizer, state in zip(optimizers, checkpoint["optimizers"], strict=True):
                optimizer.load_state_dict(state)
        print(f"resuming {path} at step {start}"
              + ", which was its last: raise --steps to train on" * (start >= args.steps))
    teacher = model.base if args.model == "posttrained" else None
    for layer in model.modules() if args.compile else ():
        if isinstance(layer, tadm.Block):
            layer.compile()
    spare = "anchor_head" if args.model == "tadm" and args.gamma == 0 else "-"  # never used then
    n_weights = sum(p.numel() for name, p in model.named_parameters() if spare not in name)
    if teacher:
        n_new = sum(p.numel() for p in model.fusion.parameters())
        print(f"fusion: {n_new:,} weights to train, {n_new / (n_weights - n_new):.1%} of the frozen base")
    print(f"preset {args.preset}, {args.model}: {args.n_anchor} + {args.n_denoiser} layers, "
          f"d = {args.d_model}, L = {args.seq_len}, V = {config.vocab_size}, {n_weights:,} weights; "
          f"{len(x_train):,} canvases to train on, {len(x_val):,} to validate")

    # Staleness as in C.2: K in {1, 2, 4, 8}, T from L/8 to 4L.
    refresh_choices = [1, 2, 4, 8] if args.anchors == "stale" else [1]
    steps_choices = [max(1, args.seq_len * 2**i // 8) for i in range(6)]
    rollout_steps = [max(3, args.seq_len // 8), max(3, args.seq_len // 4)]  # ages are 0, 1 and 2
    every = max(1, args.steps // 10)  # evaluation and checkpoint
    saved, smooth, begin, stops = start, None, time.perf_counter(), []

    def save(step):
        nonlocal saved, mine
        checkpoint = {
            "format": FORMAT, "model": args.model, "config": dataclasses.asdict(config),
            "vocab": tokenizer.vocab, "data_hash": data_hash, "args": vars(args), "step": step,
            "weights": model.state_dict(), "ema": ema.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in optimizers],
        }
        write_file(path, "--out", functools.partial(torch.save, checkpoint), place)
        saved, mine = step, path.stat().st_mtime_ns

    def place(_):
        """Where to save: an older file is kept, and that of another run is left alone."""
        nonlocal path
        if path.exists() and path.stat().st_mtime_ns != mine:
            args.out = str(free(path.parent))
            tqdm.write(f"another run has written {path}: this one goes on in {args.out}")
            path = checkpoint_path(args)
        elif path.exists() and not saved:
            old = path.replace(free(path.parent, f"{path.stem}.", ".pt"))
            tqdm.write(f"{path} exists: kept as {old}")
        return path

    def check(good, step):
        if not good:
            last = f"the last good checkpoint is {path} (step {saved})"
            raise UserError(f"the loss is not finite at step {step}; "
                            f"{last if saved else 'no checkpoint yet'}; try a smaller --lr or --gamma")

    in_main_thread = threading.current_thread() is threading.main_thread()  # others get no signals
    handlers = {number: signal.signal(number, lambda *_: stops.append(1))
                for number in (signal.SIGINT, signal.SIGTERM) if in_main_thread}
    bar = tqdm(total=args.steps, initial=start, mininterval=0.5, unit="step")
    try:
        for step in range(start + 1, args.steps + 1):
            g = step_generator(args.seed, step, device)
            rows = torch.randint(len(x_train), (args.batch_size,), generator=g, device=device)
            with autocast(args, device):
                if teacher:
                    loss = tadm.posttrain_loss(model, teacher, x_train[rows], rollout_steps[step % 2],
                                               kd_weight=KD_WEIGHT, generator=g)
                else:
                    t, t_stale = tadm.sample_times(len(rows), refresh_choices, steps_choices, g, device)
                    loss = tadm.t_anelbo(model, x_train[rows], t, t_stale, args.gamma, g)
            model.zero_grad()
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            check((loss + norm).isfinite(), step)
            warmup = min(1.0, step / min(100, args.steps))
            for optimizer in optimizers:
                optimizer.param_groups[0]["lr"] = args.lr * warmup * (1 - (step - 1) / args.steps)
                optimizer.step()
            with torch.no_grad():
                keep = min(0.99, step / (step + 9))  # a young average forgets faster
                torch._foreach_lerp_(list(ema.parameters()), list(model.parameters()), 1 - keep)
            smooth = loss.item() if smooth is None else 0.98 * smooth + 0.02 * loss.item()
            speed = per_second((step - start) * args.batch_size * args.seq_len, begin)
            bar.set_postfix_str(f"loss {smooth:.3f} nats/token, {speed:,.0f} tokens/s", refresh=False)
            bar.update()
            if step % every == 0 or step == args.steps:
                with autocast(args, device):
                    nats = tadm.bound(ema, x_val[:128], None, generator=g, draws=4).mean()
                    check(nats.isfinite() and finite(model), step)
                    z, _ = tadm.sample(ema, 1, args.seq_len, args.seq_len, 4, generator=g)
                save(step)
                text = tokenizer.decode(z[0].tolist()).replace("\n", " ")
                tqdm.write(f"step {step}: bound {nats:.3f} nats/token | {text[:100]}")
            if stops:
                check(finite(model), step)
                save(step)
                which = ["--posttrain", args.posttrain] if teacher else ["--model", args.model]
                line = command("train_toy.py", *which, "--out", args.out, "--resume")
                tqdm.write(f"stopped at step {step}, all saved; to go on: {line}")
                return None
    finally:
        bar.close()
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return ema


def sizes(args, vocab_size):
    """The Config of these options. Raises UserError."""
    with explained("these sizes do not fit", ValueError):
        return tadm.Config(vocab_size, args.seq_len or 1, args.d_model, args.n_heads,
                           args.n_anchor, args.n_denoiser)


def per_second(n, begin):
    """n per second since begin, a time.perf_counter(). Clocks may tick late: never divide by 0."""
    return n / max(time.perf_counter() - begin, 1e-9)


def command(script, *options):
    """A line that starts one of our scripts when it is pasted into this shell."""
    if not os.path.exists(script):
        script = Path(tadm.__file__).with_name(script)
    join = subprocess.list2cmdline if os.name == "nt" else shlex.join
    return join(map(str, [sys.executable, script, *options]))


def step_generator(seed, step, device):
    return torch.Generator(device).manual_seed((seed * 1_000_003 + step) % 2**63)


def autocast(args, device):
    return torch.autocast(device.type, torch.bfloat16, enabled=args.dtype == "bfloat16")


# --------------------------------------------------------------------------------- 7. report


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
    """tadm.bound of the canvases x (N, L), a few at a time: (N,) nats per token."""
    parts = [tadm.bound(model, rows, steps, refresh_every, generator, **options)
             for rows in x.split(64)]
    return torch.cat(parts)


def measure(model, x, tokenizer, steps, refresh_every, num, single, teacher=None, spacing="even"):
    """One row of a table, and the canvases z (num, L) that were sampled for it, always with the same
    noise. Layer calls are per step, relative to a model of `single` layers."""
    noise = [step_generator(0, i, x.device) for i in range(3)]
    policy = (steps, refresh_every)
    row = {"bound": float(evaluate(model, x, *policy, noise[0], spacing=spacing).mean())}
    if teacher is not None:
        kl = evaluate(model, x, *policy, noise[1], spacing=spacing, teacher=teacher)
        row["KL"] = float(kl.mean())
    begin = time.perf_counter()
    z, stats = tadm.sample(model, num, x.shape[1], *policy, spacing=spacing, generator=noise[2])
    row["tokens/s"] = per_second(z.numel(), begin)
    layers, fused = stats["layer_calls"], stats["denoiser_calls"] * fusion_share(model)
    row["stories"], row["sentences"] = valid_shares(z, tokenizer)
    row["layers"], row["+ fusion"] = layers / steps / single, (layers + fused) / steps / single
    return row, z


def show(title, table, markdown=False):
    """Print rows of strings, the first one the head, as plain columns or as Markdown."""
    width = [max(map(len, column)) for column in zip(*table)]
    print(f"\n{'### ' * markdown}{title}\n")
    for i, row in enumerate(table):
        row = [row[0].ljust(width[0]), *(c.rjust(w) for c, w in zip(row[1:], width[1:]))]
        print(f"| {' | '.join(row)} |" if markdown else "  ".join(row))
        if markdown and i == 0:
            print("|---" + "|--:" * (len(row) - 1) + "|")


def report(model, x_val, tokenizer, args):
    """Print the bound, the closing table, samples and the command to try next."""
    post, stories = args.model == "posttrained", args.data == "stories"
    L, x, device = args.seq_len, x_val[:512], x_val.device
    single = args.n_anchor or args.n_denoiser  # layers of a single-stage model of that depth
    steps, teacher, rows = 2 * L, None, [(args.model, model, K) for K in (1, 2, 4, 8)]
    if args.model == "mdlm":
        rows = rows[:1]
    if post:
        steps, single = L, args.n_anchor + args.n_denoiser
        teacher, naive = model.base, posttrained(model.config, naive=True).to(device)
        naive.load_state_dict(model.state_dict())
        rows = [("teacher", teacher, 1)] + [(name, m, K) for K in (1, 2, 3, 4, 8)
                                            for name, m in (("naive", naive), ("fused", model))]
    nats = evaluate(model, x, None, 1, step_generator(0, 0, device))
    characters = sum(len(tokenizer.decode(row)) for row in x.tolist())
    print(f"\nbound on {len(x)} validation canvases, T -> infinity, fresh anchors: {nats.mean():.4f} "
          f"+- {nats.std(correction=0) / math.sqrt(len(x)):.4f} nats/token, "
          f"{nats.sum() * L / max(1, characters):.4f} nats/character")
    if stories:
        print(f"true entropy of the built-in stories: {story_entropy() / L:.4f} nats/token")
    columns = {"bound": ".4f", "KL": ".4f", "layers": ".2f", "+ fusion": ".2f", "tokens/s": ",.0f",
               "speed-up": ".2f", "stories": ".0%", "sentences": ".0%"}
    for name, shown in (("KL", post), ("stories", stories), ("sentences", stories)):
        if not shown:
            del columns[name]
    table, slowest = [["model", "K", *columns]], None
    for name, m, K in tqdm(rows, "measuring", leave=False):
        row, z = measure(m, x[:256], tokenizer, steps, K, 64, single, teacher=teacher)
        slowest = slowest or row["tokens/s"]
        row["speed-up"] = row["tokens/s"] / slowest
        table.append([name, str(K), *(f"{row[key]:{digits}}" for key, digits in columns.items())])
    show(f"T = {steps} reverse steps, anchor refreshed every K steps; 64 canvases sampled together", table)
    print(f"\nbound: nats/token, the same noise in every row. layers: layer calls per step, relative\n"
          f"to a single-stage model of {single} layers; + fusion: its multiply-adds counted as well.\n")
    nucleus, _ = tadm.sample(model, 2, L, steps, 8, top_p=0.9, generator=step_generator(0, 2, device))
    for what, canvases in (("", z[:2]), (", nucleus 0.9", nucleus)):
        for canvas in canvases.tolist():
            print(f"sample (K = {K}{what}): {tokenizer.decode(canvas)}\n")
    path = Path(args.out) / f"{args.model}.pt"
    print(f"now try: {command('sample.py', path, '--watch')}")


# ----------------------------------------------------------------------------------- main


def run(argv):
    given = parse(argv)
    args, checkpoint, base = settings(given)
    sizes(args, 1)  # what is wrong with the options is said before the data is read
    checkpoint_path(args)
    device = pick_device(args.device)
    try:
        x_train, x_val, tokenizer = load_data(args, checkpoint or base)
    except DownloadError as e:
        if checkpoint or base:
            raise
        print(f"{e}: training on the built-in stories instead", file=sys.stderr)
        given.pop("seq_len", None)
        args = settings(given | {"data": "stories"})[0]
        x_train, x_val, tokenizer = load_data(args)
    x_train, x_val = x_train.to(device), x_val.to(device)
    failures = [torch._dynamo.exc.TorchDynamoException] if args.compile else []
    with explained("--compile does not work here: leave it off", *failures):
        model = train(args, checkpoint, base, x_train, x_val, tokenizer)
    if model is None:
        return 130
    with autocast(args, device):
        report(model, x_val, tokenizer, args)
    return 0


class Output:
    """stdout or stderr, maybe closed, on a full disk, or a pipe that nobody reads any more.

    What cannot be written is lost, and the run goes on: its weights matter more.
    """

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
            if not (isinstance(e, (MemoryError, torch.OutOfMemoryError)) or "alloc" in str(e)):
                raise
            code, error = 2, "out of memory: make --batch-size, --seq-len or --num smaller"
        except KeyboardInterrupt:
            code, error = 130, "stopped"
        if error:
            print(f"{program}: {' '.join(error.split())}", file=sys.stderr)
    return code or int(out.lost or err.lost)


def main(argv=None):
    return shielded(run, "train_toy.py", argv)


if __name__ == "__main__":
    sys.exit(main())
