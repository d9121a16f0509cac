"""Write text with a checkpoint of train_toy.py.

    python sample.py                                     # three texts, of out/tadm.pt if it exists
    python sample.py --prompt "Once upon a time" --refresh-every 8
    python sample.py --prompt "Once upon a time, ___ and Mia went to the [MASK]." --watch
    python sample.py --compare out/tadm.pt out/mdlm.pt   # the same questions to several models
"""

import argparse
import functools
import html
import itertools
import math
import os
import re
import sys
import time
from collections import Counter
from pathlib import Path

import torch
from tqdm import tqdm

import tadm
import train_toy as toy

SHIPPED = Path(__file__).parent / "assets" / "tadm.pt"  # its weights are halves; see README
WITH_COMPARE = ("data", "judge", "quick")
MASKED_ONLY = ("one_by_one", "spacing", "temperature", "top_p", "remask", "order")
HOLE = re.compile(r"( ?(?:\[MASK\]|_{3,}))")  # one hidden token; a token brings its own space


def parse(argv):
    parser = argparse.ArgumentParser(description="Write text with a checkpoint of train_toy.py.")
    parser.error = toy.fail
    add = parser.add_argument
    add("checkpoint", nargs="?", help="default: out/tadm.pt, or before any training a small one "
        "of the built-in stories that comes with the project")
    add("--num", type=toy.number(int, 1, 10**6), default=3, help="texts to write (default 3)")
    steps = parser.add_mutually_exclusive_group().add_argument
    steps("--steps", type=toy.number(int, 1), help="reverse steps T (default: twice the "
          "canvas; without masks 48)")
    steps("--one-by-one", action="store_true", help="one token per step")
    add("--refresh-every", type=toy.number(int, 1), default=4, metavar="K",
        help="run the anchor network once in K steps (default 4)")
    add("--spacing", choices=("even", "log"),
        help="refresh in every K-th step, or as often but where the canvas changes (default log)")
    add("--order", choices=("random", "confidence", "entropy"), default="random",
        help="which words come first: any (default), or those that the model is surest of")
    add("--eta", type=toy.number(float, 0), default=0.1, help="nats of entropy that a step "
        "accepts, with --order entropy or a model without masks (default 0.1)")
    add("--temperature", type=toy.number(float, 0), default=1.0, help="0: the likeliest token")
    add("--top-p", type=toy.number(float, 0, 1), default=1.0, help="nucleus (default 1: off)")
    add("--remask", choices=tadm.REMASK, default="none", help="ReMDM schedule (default none)")
    add("--seed", type=toy.number(int, 0, 2**63 - 1), default=0, help="default 0")
    add("--prompt", default="", help="how the text begins; ___ or [MASK] hides one token in it")
    add("--naive", action="store_true", help="reuse a post-trained model's anchor as it is")
    add("--watch", action="store_true", help="write one text, and show it step by step")
    add("--svg", metavar="FILE", help="write one text, and draw it as an animated picture")
    add("--compare", nargs="+", metavar="CKPT", help="measure these checkpoints and print tables")
    add("--data", metavar="FILE", help="with --compare: where their text file lies now")
    add("--judge", metavar="CKPT", help="with --compare: rate the samples by this model's bound")
    add("--quick", action="store_true", help="with --compare: a quarter of the canvases")
    add("--device", default="auto", help="auto (default) or a name that torch knows")
    args, default = parser.parse_args(argv), vars(parser.parse_args([]))
    for name in (name for name, value in vars(args).items() if value != default[name]):
        if name in WITH_COMPARE and not args.compare:
            toy.fail(f"{toy.flag(name)} needs --compare")
        if name not in (*WITH_COMPARE, "device", "compare") and args.compare:
            toy.fail(f"{toy.flag(name)} has no effect with --compare: leave it out")
    return args


def prompt_canvas(text, tokenizer, seq_len):
    """(L,) int64 canvas: the prompt's tokens, then masks. Raises UserError."""
    mask_id = len(tokenizer.vocab)
    ids = []
    for part in HOLE.split(text.strip()):
        ids += [mask_id] if HOLE.fullmatch(part) else tokenizer.encode(part)
    if len(ids) > seq_len:
        toy.fail(f"the prompt has {len(ids)} tokens, the canvas only {seq_len}: shorten it")
    return torch.tensor(ids + [mask_id] * (seq_len - len(ids)))


# ----------------------------------------------------------------------------------- drawing


class Watch:
    """A callback of tadm.sample that keeps what happens to the first canvas, and shows it if live.

    frames: after each step, its canvas, the one that the anchor saw, and its age. Where they
    differ, words that it has not seen are bright green, those masked again are red.
    Without masks, words that this step has changed are dim: noise, or words just accepted.
    Without a terminal, one plain line is printed at every refresh and at the end.
    """

    def __init__(self, model, tokenizer, canvas, steps, live):
        self.vocab, self.steps, self.live, self.slept = tokenizer.vocab, steps, live, 0.0
        self.frames, self.anchored = [(canvas, canvas, 0)], model.depths[0] > 0
        self.masked = model.mask_id is not None
        self.terminal, self.pause = sys.stdout.isatty(), min(0.1, 10 / max(1, steps))
        try:
            "█·".encode(sys.stdout.encoding or "ascii")
            self.block, self.end = " ███", " ·"
        except UnicodeError:
            self.block, self.end = " ###", " ."

    def __call__(self, step, z, age):
        canvas, saw, _ = self.frames[-1]
        if age == 0 or not (self.anchored and self.masked):
            saw = canvas  # a fresh anchor has seen the canvas before this step
        canvas = z[0].tolist()
        self.frames.append((canvas, saw, age))
        head = f"step {step + 1:>4}/{self.steps}" + f"  anchor age {age:>3}" * self.anchored
        if self.live and self.terminal:
            colors = {"mask": "2", "dim": "2", "again": "31", "new": "1;92", "seen": "0"}
            words = (f"\x1b[0;{colors[self.state(token, old)]}m{self.text(token)}"
                     for token, old in zip(canvas, saw))
            print(f"\x1b[H\x1b[J{head}\n{''.join(words)}\x1b[0m", flush=True)
            time.sleep(self.pause)
            self.slept += self.pause
        elif self.live and (age == 0 or step + 1 == self.steps):
            print(head + " |" + "".join(map(self.text, canvas)))

    def state(self, token, saw):
        mask = len(self.vocab)
        if not self.masked and token != saw:
            return "dim"
        if token == mask:
            return "mask" if saw == mask else "again"
        return "seen" if saw == token else "new"

    def text(self, token):
        if token == len(self.vocab):
            return self.block
        return self.end if token == 0 else self.vocab[token].replace("\n", " ")


STYLE = """svg{--bg:#fff;--fg:#1f2328;--dim:#59636e;--mask:#d1d9e0;--new:#1a7f37;--red:#cf222e;\
--due:#0969da}
@media(prefers-color-scheme:dark){svg{--bg:#0d1117;--fg:#f0f6fc;--dim:#9198a1;--mask:#3d444d;\
--new:#3fb950;
--red:#f85149;--due:#4493f8}}
text{font:14px ui-monospace,monospace;fill:var(--fg)}.bg{fill:var(--bg)}.dim{fill:var(--dim)}
.mask{fill:var(--mask)}.again{fill:var(--red)}.new{fill:var(--new);font-weight:bold}\
.dot{fill:var(--due)}
path{stroke:var(--dim)}.due{stroke:var(--due);stroke-width:3}"""


def animate(name, moves, mode, total=18):
    """An SVG animation that plays again and again; moves: [(share of the 18 seconds, value)]."""
    times = ";".join(f"{time:.4f}".rstrip("0").rstrip(".") for time, _ in moves)
    values = ";".join(str(value) for _, value in moves)
    return (f'<animate attributeName="{name}" values="{values}" keyTimes="{times}" '
            f'dur="{total}s" repeatCount="indefinite" calcMode="{mode}"/>')


def svg(watch, head):
    """The frames of a Watch as an SVG that plays by itself: no script, all text escaped."""
    n, W, mask = len(watch.frames) - 1, 480, len(watch.vocab)
    share = [j / n * 14 / 18 for j in range(n + 2)]  # the last frame stays for 4 seconds more
    parts, x, y = [], 15, 72
    for place in range(len(watch.frames[0][0])):
        history = [(canvas[place], saw[place]) for canvas, saw, _ in watch.frames]
        states = [(watch.state(*pair), pair[0]) for pair in history]
        words = {}
        for token in {token for token, _ in history} - {mask}:
            word = "·" if token == 0 else watch.vocab[token].strip(" ")
            words[token] = "".join(c if c.isprintable() else "·" for c in word)
        width = 8.4 * max(3, *map(len, words.values()), 0)
        x, y = (15, y + 26) if x + width > W - 15 else (x, y)
        begin = 0
        for (state, token), run in itertools.groupby(states):  # one element for each stay
            end = begin + len(list(run))
            moves = [(0, 0)] * (begin > 0) + [(share[begin], 1)] + [(share[end], 0)] * (end <= n)
            change = animate("opacity", moves, "discrete") if len(moves) > 1 else ""
            hidden = ' opacity="0"' * (end <= n)  # without animation: the last frame
            if token == mask:
                box = f'x="{x:.0f}" y="{y}" width="{width:.0f}" height="14" rx="3"'
                parts.append(f'<rect class="{state}" {box}{hidden}>{change}</rect>')
            else:
                fit = f'textLength="{8.4 * len(words[token]):.0f}" lengthAdjust="spacingAndGlyphs"'
                box, word = f'x="{x:.0f}" y="{y + 12}" {fit}', html.escape(words[token])
                parts.append(f'<text class="{state}" {box}{hidden}>{word}{change}</text>')
            begin = end
        x += width + 8
    y += 56
    xs = [15 + (W - 30) * j / n for j in range(n + 1)]
    marks, key, due = "", "no anchor", ""
    if watch.anchored:
        key = "green: the anchor has not seen it; red: masked again"
        due = "blue: the anchor is computed"
        marks = "".join(f"M{xs[j]:.1f} {y - 7}v14" for j in range(n)
                        if watch.frames[j + 1][2] == 0)
    if not watch.masked:
        key = "grey: changed in this step, noise or just accepted"
    dot = animate("cx", [(0, xs[0]), (share[n], xs[-1]), (1, xs[-1])], "linear")
    circle = f'<circle class="dot" cx="{xs[-1]}" cy="{y}" r="6">{dot}</circle>'

    def note(x, text):
        return f'<text x="{x}" y="{y + 28}" class="dim">{text}</text>'

    return f'''<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {W} {y + 40}">\
<style>{STYLE}</style>
<rect class="bg" width="{W}" height="{y + 40}" rx="8"/>\
<text x="15" y="26">{html.escape(head)}</text>
<text x="15" y="48" class="dim">{key}</text>
{"".join(parts)}
<path d="M15 {y}H{W - 15}"/><path class="due" d="{marks}"/>{circle}
{note(15, "t = 1")}{note(W - 60, "t = 0")}
{note(f"{W / 2 - 110:.0f}", due)}</svg>
'''


# -------------------------------------------------------------------------------- comparison

progress = functools.partial(tqdm, desc="measuring", leave=False)
COLUMNS = {"bound": 4, "gap": 4, "stories": 2, "sentences": 2, "perplexity": 2, "entropy": 2,
           "layers": 2, "+ fusion": 2, "tokens/s": 0, "speed-up": 2}  # and how many digits
LEGEND = """
bound: nats/token under that T, K and spacing; gap: bound less the true entropy; stories, sentences:
share of valid ones among {num} canvases; perplexity: of the samples, exp of the judge's bound;
entropy: nats/token of the words inside a sample; layers: layer calls per step relative to the {n}
layers of a single-stage model, then with the multiply-adds of the fusion; speed-up: over {ref},
K = 1. Bounds on {canvases} canvases, the same noise everywhere; +-: standard error."""


def unigram_entropy(z):
    """Entropy of the token frequencies inside each canvas of z (N, L), averaged: nats per token."""
    shares = [torch.tensor([*Counter(row).values()]) / len(row) for row in z.tolist()]
    return sum(-float((p * p.log()).sum()) for p in shares) / len(shares)


def compare(args, device):
    """Print one table for each question about these checkpoints."""
    models, first = {}, toy.load_checkpoint(args.compare[0])
    for path in dict.fromkeys([*args.compare, args.judge or args.compare[0]]):
        checkpoint = toy.load_checkpoint(path)
        models[path], tokenizer = toy.build(checkpoint, device)
        if models[path].mask_id is None:
            toy.fail(f"{path} has no mask: train_toy.py measures it, --compare cannot")
        if checkpoint.get("data_hash") != first.get("data_hash"):
            toy.fail(f"{path} and {args.compare[0]} were not trained on the same canvases")
    judge = models[args.judge] if args.judge else None
    models = {path: models[path] for path in args.compare}
    for path, model in list(models.items()):
        if isinstance(model, tadm.PostTrained):
            models[f"{path}, naive"] = toy.without_fusion(model)
    anchored = [name for name, m in models.items() if m.depths[0]]  # elsewhere K changes nothing
    stages = [m.depths[1] for m in models.values() if type(m) is tadm.MDLM]
    single = (stages or [max(m.config.n_anchor for m in models.values())])[0]
    adlm = [name for name, m in models.items() if isinstance(m, tadm.ADLM)]
    reference = (adlm or args.compare)[0]
    num = 16 if args.quick else 64
    data = argparse.Namespace(**first["args"])
    data.data = args.data or data.data
    x = toy.load_data(data, first)[1][: 4 * num].to(device)
    L = x.shape[1]

    def rate(z):
        """What the samples z (num, L) are worth."""
        stories, sentences = toy.valid_shares(z, tokenizer)
        found = {"stories": stories, "sentences": sentences, "entropy": unigram_entropy(z)}
        if judge:
            nats = toy.evaluate(judge, z, None, 1, toy.step_generator(0, 3, device))
            found["perplexity"] = math.exp(nats.mean())
        return found

    @functools.cache
    def bounds(name, T, K, spacing="even"):
        noise = toy.step_generator(0, 0, device)
        return toy.evaluate(models[name], x, T, K, noise, spacing=spacing)

    def change(name, T, K, spacing):  # paired, on the same noise
        cost = bounds(name, T, K, spacing) - bounds(name, T, 1)
        return f"{cost.mean():+.4f} +- {cost.std() / math.sqrt(len(x)):.4f}"

    columns = {name: digits for name, digits in COLUMNS.items()
               if (data.data == "stories" or name not in ("gap", "stories", "sentences"))
               and (judge or name != "perplexity")}
    policies = [(K, spacing) for K in (2, 4, 8) for spacing in ("even", "log")]
    table, slow = [["model", "K", "spacing", *columns]], None
    todo = [(name, 1, "even") for name in models] + [(n, *p) for n in anchored for p in policies]
    for name, K, spacing in progress(sorted(todo, key=lambda row: row[0] != reference)):
        row, z = toy.measure(models[name], x, tokenizer, 2 * L, K, num, single, spacing=spacing)
        row |= rate(z) | {"gap": row["bound"] - toy.story_entropy() / L}
        slow = slow or row["tokens/s"]  # the reference comes first
        row["speed-up"] = row["tokens/s"] / slow
        table.append([name, str(K), spacing, *(f"{row[c]:.{d}f}" for c, d in columns.items())])
    toy.show(f"Quality and cost against the refresh interval K, T = {2 * L}", table)

    table = [["model", "spacing", "K = 1", *(f"K = {K}" for K in (2, 4, 8, 16))]]
    for name, spacing in progress([(n, s) for n in anchored for s in ("even", "log")]):
        cells = [change(name, L, K, spacing) for K in (2, 4, 8, 16)]
        table.append([name, spacing, f"{bounds(name, L, 1).mean():.4f}", *cells])
    toy.show(f"What staleness adds to the bound, T = {L}", table)

    times = [max(1, L // 8), L // 4, L, 2 * L, 4 * L]
    table = [["model", "K", "spacing", *(f"T = {T}" for T in times)]]
    for name in progress(models):
        table.append([name, "1", "", *(f"{bounds(name, T, 1).mean():.4f}" for T in times)])
        for K, spacing in ((4, "even"), *policies[4:]) if name in anchored else ():
            table.append([name, str(K), spacing, *(change(name, T, K, spacing) for T in times)])
    toy.show("The bound at K = 1, and what staleness adds to it, against T", table)

    columns = [c for c in columns if c in ("stories", "sentences", "perplexity", "entropy")]
    table = [["model", "K", "order", "predictions", *columns]]
    runs = [(2 * L, "random", 0), *((2 * L, "entropy", eta) for eta in (0.001, 0.01, 0.1, 1.0)),
            *((T, order, 0) for T in (L, L // 2) for order in ("random", "confidence"))]
    for name, K in progress([(n, K) for n in anchored for K in (1, 8)]):
        for T, order, eta in runs:
            noise = toy.step_generator(0, 2, device)
            z, stats = toy.generate(models[name], num, T, K, noise, order=order, budget=eta)
            row = rate(z)
            what = f"{order}, eta = {eta}" if eta else order
            cells = (f"{row[c]:.2f}" for c in columns)
            table.append([name, str(K), what, str(stats["steps"]), *cells])
    toy.show("The order of reveal", table)

    table = [["model", "T", "remask", "K", "spacing", *columns]]
    for name in progress(models):
        for T, remask in ((L // 4, "cap"), (2 * L, "loop")):
            for K, spacing in [(1, "even"), *(policies[4:] if name in anchored else ())]:
                noise = toy.step_generator(0, 2, device)
                z, _ = toy.generate(models[name], num, T, K, noise, remask=remask, top_p=0.9,
                                    spacing=spacing)
                row = rate(z)
                cells = (f"{row[c]:.2f}" for c in columns)
                table.append([name, str(T), remask, str(K), spacing, *cells])
    title = "The samplers of the paper: nucleus 0.9, cap for T < L, loop for T >= L"
    toy.show(title, table)
    print(LEGEND.format(n=single, ref=reference, num=num, canvases=len(x)))
    return 0


def run(argv):
    args = parse(argv)
    device = toy.pick_device(args.device)
    if args.compare:
        return compare(args, device)

    # Load.
    path = args.checkpoint or "out/tadm.pt"
    if not args.checkpoint and not os.path.exists(path):
        print("no out/tadm.pt yet: this is the small model of the built-in stories in assets/\n")
        path = SHIPPED
    model, tokenizer = toy.build(toy.load_checkpoint(path), device)
    if args.naive and not isinstance(model, tadm.PostTrained):
        toy.fail("--naive needs a post-trained model: leave it out")
    if args.naive:
        model = toy.without_fusion(model)
    masked = model.mask_id is not None
    for name in MASKED_ONLY if not masked else ():
        if vars(args)[name] != vars(parse([]))[name]:
            toy.fail(f"{toy.flag(name)} has no effect on a model without masks: leave it out")
    if masked and args.order != "entropy" and args.eta != parse([]).eta:
        toy.fail("--eta needs --order entropy, or a model without masks")
    prompt = prompt_canvas(args.prompt, tokenizer, model.config.seq_len)
    steps = args.steps or (2 * len(prompt) if masked else toy.UNIFORM_STEPS)
    steps = None if args.one_by_one else steps
    n_steps = steps or int((prompt == len(tokenizer.vocab)).sum())
    if args.svg and not (args.svg.endswith(".svg") and 1 <= n_steps <= 1000):
        toy.fail(f"--svg draws 1 to 1000 steps, these are {n_steps}, and into a file named .svg")

    # Sample. Of a text that is watched there is one, so that the calls counted are its own.
    watch = None
    if args.watch or args.svg:
        args.num, watch = 1, Watch(model, tokenizer, prompt.tolist(), n_steps, args.watch)
    g = torch.Generator(device).manual_seed(args.seed)
    begin = time.perf_counter()
    with toy.explained("these options do not go together", ValueError):
        options = {"eta": args.eta}
        if masked:  # where steps are few and not known before, every K-th is the better plan
            spacing = args.spacing or ("even" if args.order == "entropy" else "log")
            options = {"temperature": args.temperature, "top_p": args.top_p, "spacing": spacing,
                       "remask": args.remask, "order": args.order, "budget": args.eta}
        z, stats = toy.generate(model, args.num, steps, args.refresh_every, g, callback=watch,
                                prompt=prompt.to(device), **options)
    speed = toy.per_second(z.numel(), begin + (watch.slept if watch else 0))

    # Print.
    for i, row in enumerate(z.tolist(), 1):
        print(f"[{i}] {tokenizer.decode(row)}\n")
    print(f"{stats['steps']} steps, {stats['anchor_calls']} anchor calls, "
          f"{stats['denoiser_calls']} denoiser calls, {speed:,.0f} tokens/s")
    if args.svg:
        calls = f", {stats['anchor_calls']} anchor calls" if watch.anchored else ""
        picture = svg(watch, f"{stats['steps']} reverse steps{calls}")
        toy.write_file(args.svg, "--svg", lambda part: part.write_text(picture, encoding="utf-8"))
    return 0


def main(argv=None):
    return toy.shielded(run, "sample.py", argv)


if __name__ == "__main__":
    sys.exit(main())
