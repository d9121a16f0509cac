"""Write text with a checkpoint of train_toy.py.

    python sample.py                                     # three texts from out/tadm.pt
    python sample.py --prompt "Once upon a time" --refresh-every 8
    python sample.py --prompt "Once upon a time, ___ and Mia went to the [MASK]." --watch
"""

import argparse
import re
import sys
import time

import torch

import tadm
from train_toy import UserError, build, fail, load_checkpoint, number, pick_device, shielded

HOLE = re.compile(r"( ?(?:\[MASK\]|_{3,}))")  # one hidden token; a token brings its own space


def parse(argv):
    parser = argparse.ArgumentParser(description="Write text with a checkpoint of train_toy.py.")
    parser.error = fail
    add = parser.add_argument
    add("checkpoint", nargs="?", default="out/tadm.pt", help="default: out/tadm.pt")
    add("--num", type=number(int, 1, 10**6), default=3, help="texts to write (default 3)")
    steps = parser.add_mutually_exclusive_group().add_argument
    steps("--steps", type=number(int, 1, 10**9), help="reverse steps T (default: twice the canvas)")
    steps("--one-by-one", action="store_true", help="one token per step, in random order")
    add("--refresh-every", type=number(int, 1), default=4, metavar="K",
        help="run the anchor network once in K steps (default 4)")
    add("--temperature", type=number(float, 0), default=1.0, help="0: the likeliest token")
    add("--top-p", type=number(float, 0, 1), default=1.0, help="nucleus, 0 to 1 (default 1: off)")
    add("--remask", choices=tadm.REMASK, default="none", help="ReMDM schedule (default none)")
    add("--seed", type=number(int, 0, 2**63 - 1), default=0, help="default 0")
    add("--prompt", default="", help="how the text begins; ___ or [MASK] hides one token in it")
    add("--naive", action="store_true", help="reuse a post-trained model's anchor without its fusion")
    add("--watch", action="store_true", help="show the first canvas step by step")
    add("--device", default="auto", help="auto (default) or a name that torch knows")
    return parser.parse_args(argv)


def prompt_canvas(text, tokenizer, seq_len):
    """(L,) int64 canvas: the prompt's tokens, then masks. Raises UserError."""
    mask_id = len(tokenizer.vocab)
    ids = []
    for part in HOLE.split(text.strip()):
        ids += [mask_id] if HOLE.fullmatch(part) else tokenizer.encode(part)
    if len(ids) > seq_len:
        raise UserError(f"the prompt has {len(ids)} tokens, the canvas only {seq_len}: shorten it")
    return torch.tensor(ids + [mask_id] * (seq_len - len(ids)))


class Watch:
    """A callback of tadm.sample that draws the first canvas after every step.

    In a terminal hidden tokens are blocks, new ones bright, remasked ones red. Elsewhere it prints
    one plain line at every anchor refresh and at the end.
    """

    def __init__(self, tokenizer, canvas, steps, pause):
        self.vocab, self.shown, self.steps = tokenizer.vocab, canvas, steps
        self.terminal, self.pause, self.slept = sys.stdout.isatty(), pause, 0.0
        try:
            "█⚓·".encode(sys.stdout.encoding or "ascii")
            self.block, self.mark, self.end = " ███", "⚓", " ·"
        except UnicodeError:
            self.block, self.mark, self.end = " ###", "*", " ."

    def __call__(self, step, z, age):
        before, self.shown = self.shown, z[0].tolist()
        head = f"step {step + 1:>4}/{self.steps}  anchor age {age:>3} {' ' if age else self.mark}"
        if self.terminal:
            body = "".join(map(self.cell, before, self.shown))
            print(f"\x1b[H\x1b[J{head}\n{body}\x1b[0m", flush=True)
            time.sleep(self.pause)
            self.slept += self.pause
        elif age == 0 or step + 1 == self.steps:
            print(head + " |" + "".join(self.text(token) for token in self.shown))

    def text(self, token):
        if token == len(self.vocab):
            return self.block
        return self.end if token == 0 else self.vocab[token].replace("\n", " ")

    def cell(self, old, new):
        hidden = new == len(self.vocab)
        color = "2" if old == new and hidden else "31" if hidden else "0" if old == new else "1;92"
        return f"\x1b[0;{color}m{self.text(new)}"


def run(argv):
    args = parse(argv)
    device = pick_device(args.device)
    model, tokenizer = build(load_checkpoint(args.checkpoint), device)
    if args.naive and not isinstance(model, tadm.PostTrained):
        raise UserError("--naive needs a post-trained model: leave it out")
    model.naive, seq_len = args.naive, model.config.seq_len
    if args.one_by_one and args.remask != "none":
        raise UserError("--remask needs a number of steps: leave --one-by-one out")
    steps = None if args.one_by_one else args.steps or 2 * seq_len
    prompt = prompt_canvas(args.prompt, tokenizer, seq_len)
    n_steps = steps or int((prompt == model.mask_id).sum())
    watch = Watch(tokenizer, prompt.tolist(), n_steps, min(0.1, 10 / max(1, n_steps)))
    begin = time.time()
    try:
        z, stats = tadm.sample(
            model, args.num, seq_len, steps, args.refresh_every, prompt.to(device), args.remask,
            args.temperature, args.top_p, torch.Generator(device).manual_seed(args.seed),
            watch if args.watch else None,
        )
    except ValueError as e:
        raise UserError(str(e)) from None
    seconds = time.time() - begin - watch.slept
    for i, row in enumerate(z.tolist(), 1):
        print(f"[{i}] {tokenizer.decode(row)}\n")
    print(f"{stats['steps']} steps, {stats['anchor_calls']} anchor calls, "
          f"{stats['denoiser_calls']} denoiser calls, {z.numel() / seconds:,.0f} tokens/s")
    return 0


def main(argv=None):
    return shielded(run, "sample.py", argv)


if __name__ == "__main__":
    sys.exit(main())
