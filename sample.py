"""Write text with a checkpoint of train_toy.py.

    python sample.py --prompt "One day, ___ and Mia went to the [MASK]." --watch
    python sample.py --compare out/tadm.pt out/mdlm.pt
"""

import argparse
import functools
import html
import itertools
import math
import re
import sys
import time
from pathlib import Path

import torch
from tqdm import tqdm

import tadm
import train_toy as toy

SHIPPED = Path(__file__).parent / "assets" / "tadm.pt"  # its weights are halves; see README
WITH_COMPARE = ("data", "judge", "quick")
MASKED_ONLY = ("temperature", "top_p", "remask", "spacing", "order")


def parse(argv):
    parser = argparse.ArgumentParser(description="Write text. Defaults stand in brackets.")
    parser.error = toy.fail
    add, count = parser.add_argument, toy.number(int, 1)
    trained = Path("out/tadm.pt")
    add("checkpoint", nargs="?", default=trained if trained.exists() else SHIPPED,
        help=f"default: {trained}, or a small model in assets/")
    add("--num", type=count, default=3, help="texts to write (default 3)")
    steps = parser.add_mutually_exclusive_group().add_argument
    steps("--steps", type=count, help="default: twice the canvas, or 48")
    steps("--one-by-one", action="store_true", help="one token per step")
    add("--refresh-every", type=count, default=4, metavar="K", help="anchor once in K steps (4)")
    add("--spacing", choices=("even", "log"), help="of anchors; log: denser at first")
    add("--order", choices=("random", "confidence", "entropy"), default="random",
        help="which words come first: any, or the surest")
    positive = toy.number(float, 0)
    add("--eta", type=positive, default=0.1, help="nats that a step accepts (0.1)")
    add("--temperature", type=positive, default=1.0, help="0: the likeliest token")
    add("--top-p", type=toy.number(float, 0, 1), default=1.0, help="nucleus (1: off)")
    add("--remask", choices=tadm.REMASK, default="none", help="ReMDM schedule (none)")
    add("--seed", type=toy.number(int, 0, 2**63 - 1), default=0, help="default 0")
    add("--prompt", default="", help="how it begins; ___ or [MASK] hides one token")
    add("--naive", action="store_true", help="post-trained: without its fusion")
    add("--watch", action="store_true", help="show one text step by step")
    add("--svg", metavar="FILE", help="draw one text as a moving picture")
    add("--device", default="auto", help="auto (default) or a name that torch knows")
    add("--compare", nargs="+", metavar="CKPT", help="print tables about checkpoints")
    add("--data", metavar="FILE", help="with --compare: where their text lies now")
    add("--judge", metavar="CKPT", help="with --compare: rate samples by its bound")
    add("--quick", action="store_true", help="with --compare: fewer canvases")
    args, default = parser.parse_args(argv), vars(parser.parse_args([]))
    args.given = [name for name, value in vars(args).items() if value != default[name]]
    for name in args.given:
        if name in WITH_COMPARE and not args.compare:
            toy.fail(f"{toy.flag(name)} needs --compare")
        if args.compare and name not in (*WITH_COMPARE, "compare", "device"):
            toy.fail(f"{toy.flag(name)} has no effect with --compare")
    return args


# ----------------------------------------------------------------------------------- drawing

STYLE = """svg{--bg:#fff;--fg:#1f2328;--dim:#59636e;--mask:#d1d9e0;--new:#1a7f37;--red:#cf222e;
--due:#0969da}@media(prefers-color-scheme:dark){svg{--bg:#0d1117;--fg:#f0f6fc;--dim:#9198a1;
--mask:#3d444d;--new:#3fb950;--red:#f85149;--due:#4493f8}}
text{font:14px ui-monospace,monospace;fill:var(--fg)}.bg{fill:var(--bg)}.dim{fill:var(--dim)}
.mask{fill:var(--mask)}.again{fill:var(--red)}.new{fill:var(--new);font-weight:bold}
.dot{fill:var(--due)}path{stroke:var(--dim)}.due{stroke:var(--due);stroke-width:3}"""


class Watch:
    """A callback of tadm.sample: keeps how the first canvas looks, and shows it if live.
    frames: before and after each step, the (kind, word) of its tokens."""

    def __init__(self, model, tokenizer, canvas, steps, live):
        words = [[c if c.isprintable() else "·" for c in word] for word in tokenizer.vocab[1:]]
        self.words = [" ·", *map("".join, words), " ███"]  # end token, words, mask
        self.mask = len(tokenizer.vocab)
        self.anchored, self.masked = model.depths[0] > 0, model.mask_id is not None
        self.canvas, self.saw, self.steps, self.live = canvas, canvas, steps, live
        self.due, self.refreshed, self.frames = [], [], [[*map(self.look, canvas, canvas)]]
        self.terminal = live and sys.stdout.isatty()
        self.pause = min(0.1, 10 / max(1, steps))

    def __call__(self, step, z, age):
        if age == 0 or not (self.anchored and self.masked):
            self.saw = self.canvas  # a fresh anchor has seen the canvas before this step
        self.due = [step] if age == 0 and self.anchored else self.due
        before, self.canvas = self.canvas, z[0].tolist()
        if not self.masked or any(a == self.mask != b for a, b in zip(before, self.canvas)):
            self.refreshed += self.due  # an anchor is computed when a word is revealed with it
            self.due = []
        looks = [*map(self.look, self.canvas, self.saw)]
        self.frames.append(looks)
        head = f"step {step + 1:>4}/{self.steps}" + f"  anchor age {age:>3}" * self.anchored
        if self.terminal:
            colors = {"mask": "2", "dim": "2", "again": "31", "new": "1;92", "seen": "0"}
            text = "".join(f"\x1b[0;{colors[kind]}m{word}" for kind, word in looks)
            print(f"\x1b[H\x1b[J{head}\n{text}\x1b[0m", flush=True)
            time.sleep(self.pause)
        elif self.live and (age == 0 or step + 1 == self.steps):
            print(f"{head} |{''.join(word for _, word in looks)}")

    def look(self, token, saw):
        """The (kind, word) of a token where the anchor saw another one, or the same."""
        kinds = ("mask", "again") if token == self.mask else ("seen", "new")
        if not self.masked:
            kinds = (kinds[0], "dim")  # noise, or just accepted
        return kinds[token != saw], self.words[token]


def svg(watch, head):
    """The frames of a Watch as an SVG that plays by itself: no script, all text escaped."""
    n = len(watch.frames) - 1
    last, again = 14 / 18, 'dur="18s" repeatCount="indefinite"'  # with a pause of 4 seconds
    parts, x, y = [], 15, 72  # the words stand from x = 15 to 465
    for stays in zip(*watch.frames):
        stays = [(kind, word.strip(" ")) for kind, word in stays]
        width = 8.4 * max(3, *(len(word) for _, word in stays))
        if x + width > 465:
            x, y = 15, y + 26
        end = 0
        for (kind, word), stay in itertools.groupby(stays):  # one element for each
            begin, end = end, end + len(list(stay))
            moves, opacity = {0: 0, begin / n * last: 1}, ""
            if end <= n:  # what does not play animations shows the last frame
                moves[end / n * last], opacity = 0, ' opacity="0"'
            times = ";".join(f"{round(time, 4):g}" for time in moves)
            values = ";".join(map(str, moves.values()))
            change = (f'<animate attributeName="opacity" values="{values}" keyTimes="{times}" '
                      f'{again} calcMode="discrete"/>') * (len(moves) > 1)
            look = f'class="{kind}" x="{x:.0f}"'
            if kind in ("mask", "again"):
                look += f' y="{y}" width="{width:.0f}" height="14" rx="3"{opacity}'
                parts.append(f'<rect {look}>{change}</rect>')
            else:
                look += f' y="{y + 12}" textLength="{8.4 * len(word):.0f}"'
                look += f' lengthAdjust="spacingAndGlyphs"{opacity}'
                parts.append(f'<text {look}>{html.escape(word)}{change}</text>')
        x += width + 8
    y += 56
    marks = "".join(f"M{15 + 450 * j / n:.1f} {y - 7}v14" for j in watch.refreshed)
    due = "blue: the anchor is computed" if marks else ""
    key = "green: the anchor has not seen it; red: masked again" if marks else "no anchor"
    if not watch.masked:
        key = "grey: changed in this step, noise or just accepted"
    dot = ('<animate attributeName="cx" values="15.0;465.0;465.0" '
           f'keyTimes="0;{last:.4f};1" {again} calcMode="linear"/>')
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 480 {y + 40}">
<style>{STYLE}</style>
<rect class="bg" width="480" height="{y + 40}" rx="8"/>
<text x="15" y="26">{html.escape(head)}</text>
<text x="15" y="48" class="dim">{key}</text>
{"".join(parts)}
<path d="M15 {y}H465"/><path class="due" d="{marks}"/>
<circle class="dot" cx="465.0" cy="{y}" r="6">{dot}</circle>
<text x="15" y="{y + 28}" class="dim">t = 1</text>
<text x="420" y="{y + 28}" class="dim">t = 0</text>
<text x="130" y="{y + 28}" class="dim">{due}</text></svg>
"""


# -------------------------------------------------------------------------------- comparison

def unigram_entropy(z):
    """Entropy of the token frequencies inside each canvas of z (N, L), averaged."""
    shares = [row.unique(return_counts=True)[1] / len(row) for row in z]
    return sum(-float((p * p.log()).sum()) for p in shares) / len(shares)


def compare(args, device):
    """Print one table for each question about these checkpoints."""
    models, first = {}, toy.load_checkpoint(args.compare[0])
    for path in filter(None, (*args.compare, args.judge)):
        checkpoint = toy.load_checkpoint(path)
        models[path], tokenizer = toy.build(checkpoint, device)
        if models[path].mask_id is None:
            toy.fail(f"{path} has no mask: --compare cannot measure it")
        if checkpoint["data_hash"] != first["data_hash"]:
            toy.fail(f"{path} and {args.compare[0]} were not trained on the same canvases")
    judge = models.get(args.judge)
    models = {path: models[path] for path in args.compare}
    models |= {f"{path}, naive": toy.without_fusion(m) for path, m in models.items()
               if isinstance(m, tadm.PostTrained)}
    anchored = [name for name, m in models.items() if m.depths[0]]  # others have no K
    single = next((m.depths[1] for m in models.values() if type(m) is tadm.MDLM),
                  max(m.config.n_anchor for m in models.values()))
    data = argparse.Namespace(**first["args"])
    data.data = args.data or data.data
    num = 16 if args.quick else 64
    x = toy.load_data(data, first)[1][: 4 * num].to(device)
    progress = functools.partial(tqdm, desc="measuring", leave=False)
    noise = functools.partial(toy.step_generator, 0, device=device)
    L, stories = x.shape[1], data.data == "stories"
    quality = ["stories", "sentences"] * stories + ["perplexity"] * bool(judge) + ["entropy"]

    def rate(z):  # the cells of `quality`, of samples z
        found = [*toy.valid_shares(z, tokenizer).values()] * stories
        if judge:
            found.append(math.exp(toy.evaluate(judge, z, None, 1, noise(3)).mean()))
        return [f"{value:.2f}" for value in (*found, unigram_entropy(z))]

    @functools.cache
    def bounds(name, T, K=1, spacing="even"):
        return toy.evaluate(models[name], x, T, K, noise(0), spacing=spacing)

    def cost(name, T, K, spacing):  # the bound at K = 1, else what K adds to it
        if K == 1:
            return f"{bounds(name, T).mean():.4f}"
        added = bounds(name, T, K, spacing) - bounds(name, T)
        error = f" +- {added.std() / math.sqrt(len(x)):.4f}" if len(x) > 1 else ""
        return f"{added.mean():+.4f}{error}"

    def plans(*policies):
        return [(name, K, spacing) for name in models for K, spacing in policies
                if name in anchored or K == 1]

    table = [["model", "K", "spacing", "bound", *["gap"] * stories, *quality,
              "layers", "+ fusion", "tokens/s"]]
    policies = itertools.product((2, 4, 8), ("even", "log"))
    for name, K, spacing in progress(plans((1, "even"), *policies)):
        row, z = toy.measure(models[name], x, 2 * L, K, num, single, spacing=spacing)
        gap = [f"{row['bound'] - toy.story_entropy() / L:.4f}"] * stories
        bound, *work = (f"{value:{toy.FORMATS[key]}}" for key, value in row.items())
        table.append([name, str(K), spacing, bound, *gap, *rate(z), *work])
    toy.show(f"Quality and cost against the refresh interval K, T = {2 * L}", table)

    intervals = (1, 2, 4, 8, 16)
    table = [["model", "spacing", *(f"K = {K}" for K in intervals)]]
    for name, spacing in progress([*itertools.product(anchored, ("even", "log"))]):
        table.append([name, spacing, *(cost(name, L, K, spacing) for K in intervals)])
    toy.show(f"What staleness adds to the bound, T = {L}", table)

    times = (max(1, L // 8), L // 4, L, 2 * L, 4 * L)
    table = [["model", "K", "spacing", *(f"T = {T}" for T in times)]]
    for name, K, spacing in progress(plans((1, ""), (4, "even"), (8, "even"), (8, "log"))):
        table.append([name, str(K), spacing, *(cost(name, T, K, spacing) for T in times)])
    toy.show("The bound at K = 1, and what staleness adds to it, against T", table)

    runs = [(2 * L, "random", 0), *((2 * L, "entropy", eta) for eta in (0.001, 0.01, 0.1, 1.0)),
            *itertools.product((L, L // 2), ("random", "confidence"), [0])]
    table = [["model", "K", "order", "predictions", *quality]]
    for name, K, (T, order, eta) in progress([*itertools.product(anchored, (1, 8), runs)]):
        z, stats = toy.generate(models[name], num, T, K, noise(2), order=order, budget=eta)
        what = f"{order}, eta = {eta}" if eta else order
        table.append([name, str(K), what, str(stats["steps"]), *rate(z)])
    toy.show("The order of reveal", table)

    table = [["model", "T", "remask", "K", "spacing", *quality]]
    for T, remask in ((L // 4, "cap"), (2 * L, "loop")):
        for name, K, spacing in progress(plans((1, "even"), (8, "even"), (8, "log"))):
            z, _ = toy.generate(models[name], num, T, K, noise(2), remask=remask, top_p=0.9,
                                spacing=spacing)
            table.append([name, str(T), remask, str(K), spacing, *rate(z)])
    toy.show("The samplers of the paper: nucleus 0.9, cap for T < L, loop for T >= L", table)
    print(f"\nbound: nats/token, {len(x)} canvases, +- standard error; gap: to the true\n"
          "entropy; perplexity: by the judge; entropy: of the words inside a sample;\n"
          f"layers: calls per step over {single}, then with the fusion's work.")


def run(argv):
    args = parse(argv)
    device = toy.pick_device(args.device)
    if args.compare:
        return compare(args, device)

    # Load.
    if args.checkpoint == SHIPPED:
        print("no out/tadm.pt yet: assets/tadm.pt, a small model of the built-in stories\n")
    model, tokenizer = toy.build(toy.load_checkpoint(args.checkpoint), device)
    if args.naive and not isinstance(model, tadm.PostTrained):
        toy.fail("--naive needs a post-trained model")
    model = toy.without_fusion(model) if args.naive else model
    masked = model.mask_id is not None
    for name in args.given:
        if name in ("one_by_one", *MASKED_ONLY) and not masked:
            toy.fail(f"{toy.flag(name)} has no effect on a model without masks")
    if "eta" in args.given and masked and args.order != "entropy":
        toy.fail("--eta needs --order entropy, or a model without masks")

    # The canvas: the prompt's tokens, with a mask for each hole and its space, then masks.
    L, mask, ids = model.config.seq_len, len(tokenizer.vocab), []
    for i, part in enumerate(re.split(r"( ?\[MASK\]| ?_{3,})", args.prompt.strip())):
        ids += [mask] if i % 2 else tokenizer.encode(part)  # every second one is a hole
    if len(ids) > L:
        toy.fail(f"the prompt has {len(ids)} tokens, the canvas only {L}: shorten it")
    canvas = ids + [mask] * (L - len(ids))
    T = None if args.one_by_one else args.steps or (2 * L if masked else toy.UNIFORM_STEPS)
    steps = T or canvas.count(mask)
    if args.svg and not (args.svg.endswith(".svg") and 1 <= steps <= 1000):
        toy.fail(f"--svg draws 1 to 1000 steps (here {steps}) into a file named .svg")

    # Sample. Of a text that is watched there is one, so that the calls counted are its own.
    watch = Watch(model, tokenizer, canvas, steps, args.watch)
    num = 1 if args.watch or args.svg else args.num
    options = {"eta": args.eta}
    if masked:  # where steps are few and not known before, every K-th is the better plan
        args.spacing = args.spacing or ("even" if args.order == "entropy" else "log")
        options = {name: vars(args)[name] for name in MASKED_ONLY} | {"budget": args.eta}
    g = torch.Generator(device).manual_seed(args.seed)
    begin = time.perf_counter()
    with toy.explained("these options do not go together", ValueError):
        z, stats = toy.generate(model, num, T, args.refresh_every, g, callback=watch,
                                prompt=torch.tensor(canvas, device=device), **options)
    begin += watch.pause * watch.terminal * stats["steps"]  # what --watch has slept
    speed = z.numel() / max(time.perf_counter() - begin, 1e-9)  # clocks may tick late

    # Print.
    for i, row in enumerate(z.tolist(), 1):
        print(f"[{i}] {tokenizer.decode(row)}\n")
    print(f"{stats['steps']} steps, {stats['anchor_calls']} anchor calls, "
          f"{stats['denoiser_calls']} denoiser calls, {speed:,.0f} tokens/s")
    if args.svg:
        head = f"{stats['steps']} reverse steps, {len(watch.refreshed)} anchor calls"
        picture = svg(watch, head)
        toy.write_file(args.svg, "--svg", lambda part: part.write_text(picture, "utf-8"))


main = functools.partial(toy.shielded, run, "sample.py")

if __name__ == "__main__":
    sys.exit(main())
