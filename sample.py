"""Write text with a checkpoint of train_toy.py.

    python sample.py                                     # three texts from out/tadm.pt
    python sample.py --prompt "Once upon a time" --refresh-every 8
    python sample.py --prompt "Once upon a time, ___ and Mia went to the [MASK]." --watch
    python sample.py --compare out/tadm.pt out/mdlm.pt   # the same questions to several models
"""

import argparse
import html
import itertools
import math
import re
import sys
import time
from collections import Counter, defaultdict

import torch
from tqdm import tqdm

import tadm
from train_toy import (
    UserError,
    build,
    explained,
    fail,
    load_checkpoint,
    load_data,
    number,
    per_second,
    pick_device,
    posttrained,
    shielded,
    step_generator,
    story_entropy,
    valid_share,
    write_file,
)

WITH_COMPARE = ("data", "judge", "quick", "markdown")
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
    add("--svg", metavar="FILE", help="draw the first canvas as an animated picture, 1000 steps at most")
    add("--compare", nargs="+", metavar="CKPT", help="measure these checkpoints and print tables")
    add("--data", metavar="FILE", help="with --compare: where their text file lies now")
    add("--judge", metavar="CKPT", help="with --compare: rate the samples by this model's bound")
    add("--quick", action="store_true", help="with --compare: one seed and few canvases")
    add("--markdown", action="store_true", help="with --compare: print Markdown")
    add("--device", default="auto", help="auto (default) or a name that torch knows")
    args, default = parser.parse_args(argv), vars(parser.parse_args([]))
    for name in (name for name, value in vars(args).items() if value != default[name]):
        flag = f"--{name.replace('_', '-')}"
        if name in WITH_COMPARE and not args.compare:
            fail(f"{flag} needs --compare")
        if name not in (*WITH_COMPARE, "device", "compare") and args.compare:
            fail(f"{flag} has no effect with --compare: leave it out")
    return args


def prompt_canvas(text, tokenizer, seq_len):
    """(L,) int64 canvas: the prompt's tokens, then masks. Raises UserError."""
    mask_id = len(tokenizer.vocab)
    ids = []
    for part in HOLE.split(text.strip()):
        ids += [mask_id] if HOLE.fullmatch(part) else tokenizer.encode(part)
    if len(ids) > seq_len:
        raise UserError(f"the prompt has {len(ids)} tokens, the canvas only {seq_len}: shorten it")
    return torch.tensor(ids + [mask_id] * (seq_len - len(ids)))


# ----------------------------------------------------------------------------------- drawing


class Watch:
    """A callback of tadm.sample that keeps what happens to the first canvas, and shows it if live.

    frames: after each step its canvas, the anchor's age, and for each token how much the fusion
    corrected the anchor in the last prediction, |g * Delta| / |h| (None without a fusion). In a terminal
    hidden tokens are blocks, new ones bright, remasked ones red, corrected ones on blue. Elsewhere one
    plain line is printed at every anchor refresh and at the end.
    """

    def __init__(self, model, tokenizer, canvas, steps, live):
        self.vocab, self.steps, self.live, self.slept = tokenizer.vocab, steps, live, 0.0
        self.frames, self.size, self.summed = [(canvas, 0, None)], None, []
        self.terminal, self.pause = sys.stdout.isatty(), min(0.1, 10 / max(1, steps))
        self.fusion, self.anchored = getattr(model, "fusion", None), model.depths[0] > 0
        if self.fusion is not None:
            self.fusion.register_forward_hook(self.measure)
        if isinstance(self.fusion, tadm.GatedFusion):  # h + g * Delta goes into its last norm
            self.fusion.norm_out.register_forward_hook(lambda _, args, out: self.summed.append(args[0]))
        try:
            "█⚓·".encode(sys.stdout.encoding or "ascii")
            self.block, self.mark, self.end = " ███", "⚓", " ·"
        except UnicodeError:
            self.block, self.mark, self.end = " ###", "*", " ."

    def measure(self, fusion, args, out):  # args: c, h of a gated, c, c_cached, h of a paired fusion
        h, fused = args[1 if self.summed else 2], self.summed.pop() if self.summed else out
        self.size = ((fused - h)[0].norm(dim=-1) / h[0].norm(dim=-1)).tolist()

    def __call__(self, step, z, age):
        before, shown = self.frames[-1][0], z[0].tolist()
        if self.size and age == 0 and isinstance(self.fusion, tadm.PairedFusion):
            self.size = [0.0] * len(shown)  # a fresh anchor: M = 0, the fusion does not run
        self.frames.append((shown, age, self.size))
        size, mark = self.size or [0.0] * len(shown), " " if age else self.mark
        head = f"step {step + 1:>4}/{self.steps}" + (
            f"  anchor age {age:>3} {mark}" if self.anchored else "") + (
            f"  correction {sum(size) / len(size):.2f}" if self.size else "")
        if self.live and self.terminal:
            body = "".join(map(self.cell, before, shown, size))
            print(f"\x1b[H\x1b[J{head}\n{body}\x1b[0m", flush=True)
            time.sleep(self.pause)
            self.slept += self.pause
        elif self.live and (age == 0 or step + 1 == self.steps):
            print(head + " |" + "".join(map(self.text, shown)))

    def text(self, token):
        if token == len(self.vocab):
            return self.block
        return self.end if token == 0 else self.vocab[token].replace("\n", " ")

    def cell(self, old, new, size):
        hidden = new == len(self.vocab)
        color = "2" if old == new and hidden else "31" if hidden else "0" if old == new else "1;92"
        blue = f";48;5;{16 + min(5, int(2.5 * size))}" if size >= 0.4 else ""  # the brightest from 2 on
        return f"\x1b[0;{color}{blue}m{self.text(new)}"


STYLE = """svg{--bg:#fff;--fg:#1f2328;--dim:#6e7781;--mask:#d0d7de;--new:#1a7f37;--red:#cf222e;--fix:#0969da}
@media(prefers-color-scheme:dark){svg{--bg:#0d1117;--fg:#e6edf3;--dim:#8b949e;--mask:#30363d;--new:#3fb950;
--red:#f85149;--fix:#58a6ff}}
text{font:13px ui-monospace,monospace;fill:var(--fg)}.d{fill:var(--dim)}.b{fill:var(--bg)}.m{fill:var(--mask)}
.c{fill:var(--fix)}.p{font-weight:bold}.n{animation:n 1.5s both}.r{fill:var(--red);animation:r 1.5s both}
path{fill:none;stroke:var(--dim)}.a{stroke:var(--fix);stroke-width:2}
@keyframes n{0%,40%{fill:var(--new);font-weight:bold}}
@keyframes r{from{opacity:0}1%{opacity:1}to{opacity:0}}"""


def svg(watch, head, seconds=12):
    """The frames of a Watch as one animated SVG (str): no script, all text escaped, the last frame stays."""
    frames, mask, n, W = watch.frames, len(watch.vocab), len(watch.frames) - 1, 900
    most = max((max(size) for _, _, size in frames if size), default=0)
    parts, x, y, stride = [], 20, 60, 1 + n * len(frames[0][0]) // 40_000  # bounds the size of the file

    def when(j, attribute='begin="{}s"'):
        return attribute.format(f"{j * seconds / n:.2f}")

    def run(attribute, values, mode="discrete"):
        return (f'<animate attributeName="{attribute}" values="{";".join(map(str, values))}" '
                f'dur="{seconds}s" fill="freeze" calcMode="{mode}"/>')

    for place, canvas in enumerate(zip(*(canvas for canvas, _, _ in frames))):
        words = {token: "·" if token == 0 else "".join(c if c.isprintable() else "·" for c in
                 watch.vocab[token].strip(" ")) for token in {*canvas} - {mask}}
        width = 8 + 7.8 * max(4, *map(len, words.values()), 0)
        x, y = (20, y + 40) if x + width > W - 20 else (x, y)
        box = f'x="{x:.0f}" width="{width:.0f}"'
        begins = [0, *(j for j in range(1, n + 1) if canvas[j] != canvas[j - 1])]
        for j, end in itertools.zip_longest(begins, begins[1:]):  # one element for each stay of a token
            on = f'<set attributeName="opacity" to="1" {when(j)} fill="freeze"/>' if j else ""
            off = f'<set attributeName="opacity" to="0" {when(end)} fill="freeze"/>' if end else ""
            delay, opacity = when(j, 'style="animation-delay:{}s"'), 'opacity="0"' if j else ""
            if canvas[j] == mask:
                parts.append(f'<rect class="m" {box} y="{y}" height="20" rx="3" {opacity}>{on}{off}</rect>')
                parts += [f'<rect class="r" {box} y="{y}" height="20" rx="3" {delay}/>'] if j else []
            else:
                word, kind = words[canvas[j]], f'class="n" {delay} {opacity}' if j else 'class="p"'
                fit = f'textLength="{7.8 * len(word):.0f}" lengthAdjust="spacingAndGlyphs"'
                word = html.escape(word) + on + off
                parts.append(f'<text x="{x + 4:.0f}" y="{y + 15}" {fit} {kind}>{word}</text>')
        if most:
            bars = [round(10 * size[place] / most) if size else 0 for _, _, size in frames[::stride]]
            parts.append(f'<rect class="c" {box} y="{y + 22}" height="0">{run("height", bars)}</rect>')
        x += width + 4
    y, ages = y + 100, [age if watch.anchored else 0 for _, age, _ in frames[1:]]
    xs, ys = [20 + (W - 40) * j / n for j in range(n + 1)], [y - 36 * age / max(1, *ages) for age in ages]
    saw = "".join(f"L{a:.1f} {b:.1f}H{c:.1f}" for a, b, c in zip(xs, ys, xs[1:]))
    due = "".join(f"M{a:.1f} {y + 4}v8" for a, age in zip(xs, ages) if age == 0 and watch.anchored)
    key = f"; bars: correction of the stale anchor, |g ⊙ Δ| / |h|, at most {most:.2f}" if most else ""
    plot = f"age of the anchor, 0 to {max(ages)} steps; blue marks: the anchor is due"
    return f'''<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {W} {y + 40}"><style>{STYLE}</style>
<rect class="b" width="{W}" height="{y + 40}" rx="8"/><text x="20" y="28" class="p">{html.escape(head)}</text>
<text x="20" y="48" class="d">grey: masked, green: new, red: remasked{key}</text>
{"".join(parts)}
<text x="20" y="{y - 46}" class="d">{plot if watch.anchored else "no anchor"}</text>
<path d="M20 {y}{saw}"/><path class="a" d="{due}"/>
<circle class="c" r="5">{run("cx", (20, W - 20), "linear")}{run("cy", [f"{v:.0f}" for v in ys])}</circle>
<text x="20" y="{y + 28}" class="d">t = 1</text><text x="{W - 60}" y="{y + 28}" class="d">t = 0</text></svg>
'''


# -------------------------------------------------------------------------------- comparison

COLUMNS = {"bound": 4, "gap": 4, "valid": 2, "perplexity": 2, "entropy": 2, "layers": 2,
           "+ fusion": 2, "tokens/s": 0, "speed-up": 2}  # and how many digits
LEGEND = """
bound: nats/token under that K and T; gap: bound less the true entropy; valid: share of valid stories;
perplexity: of the samples, exp of the judge's bound; entropy: nats/token of the words inside a
sample; layers: layer calls per step relative to the {n} layers of a single-stage model, then with the
fusion counted as its share of a layer; speed-up: over {ref}, K = 1. Seeds: {seeds}{error}."""


def fusion_share(model):
    """Multiply-adds of the fusion as a share of a layer's; 0 without a fusion."""
    if not hasattr(model, "fusion") or getattr(model, "naive", False):
        return 0.0
    d, L = model.config.d_model, model.config.seq_len
    work = sum(p.numel() for p in model.fusion.parameters() if p.dim() == 2)
    if isinstance(model.fusion, tadm.PairedFusion):
        work += 2 * L * model.fusion.out.in_features  # its attention
    return work / (12 * d * d + 2 * L * d)


def unigram_entropy(z):
    """Entropy of the token frequencies inside each canvas of z (N, L), averaged: nats per token."""
    shares = [torch.tensor([*Counter(row).values()]) / len(row) for row in z.tolist()]
    return sum(-float((p * p.log()).sum()) for p in shares) / len(shares)


def measure(model, judge, tokenizer, x, n, stories, single, K, T, seed):
    """A value, or None where it does not apply, for each of COLUMNS; the last is still tokens/s."""
    L = x.shape[1]
    noise = [step_generator(seed, i, x.device) for i in range(3)]
    nats = float(tadm.bound(model, x, T, K, noise[0]).mean())
    begin = time.perf_counter()
    z, stats = tadm.sample(model, n, L, T, K, generator=noise[1])
    speed = per_second(z.numel(), begin)
    perplexity = judge and math.exp(tadm.bound(judge, z, None, generator=noise[2]).mean())
    layers, fused = stats["layer_calls"], stats["denoiser_calls"] * fusion_share(model)
    return (nats, nats - story_entropy() / L if stories else None,
            valid_share(z, tokenizer) if stories else None, perplexity, unigram_entropy(z),
            layers / T / single, (layers + fused) / T / single, speed, speed)


def cell(values, digits):
    """Mean +- standard error of one column over the seeds."""
    if values[0] is None:
        return "-"
    v = torch.tensor(values)
    error = f" +- {v.std() / math.sqrt(len(v)):.{digits}f}" if len(v) > 1 else ""
    return f"{v.mean():.{digits}f}{error}"


def compare(args, device):
    """Print one table for each question: quality against K, and against T."""
    models, first = {}, load_checkpoint(args.compare[0])
    for path in dict.fromkeys([*args.compare, args.judge or args.compare[0]]):
        checkpoint = load_checkpoint(path)
        models[path], tokenizer = build(checkpoint, device)
        if checkpoint.get("data_hash") != first.get("data_hash"):
            raise UserError(f"{path} and {args.compare[0]} were not trained on the same canvases")
    judge = models[args.judge] if args.judge else None
    models = {path: models[path] for path in args.compare}
    for path, model in list(models.items()):
        if isinstance(model, tadm.PostTrained):
            naive = posttrained(model.config, naive=True)
            naive.load_state_dict(model.state_dict())
            models[f"{path}, naive"] = naive.to(device).eval()
    stages = [m.depths[1] for m in models.values() if type(m) is tadm.MDLM]
    single = (stages or [max(m.config.n_anchor for m in models.values())])[0]
    n, seeds = (16, 1) if args.quick else (64, 3)
    data = argparse.Namespace(**first["args"])
    data.data = args.data or data.data
    x = load_data(data, first)[1][: 4 * n].to(device)
    L = x.shape[1]
    questions = {
        f"Quality and cost against the refresh interval K, T = {2 * L}":
            [(name, K, 2 * L) for name in models for K in (1, 2, 4, 8)],
        "Staleness against the number of steps T":
            [(name, K, T) for name in models for T in (L, 2 * L, 4 * L) for K in (1, 8)],
    }
    for title, rows in questions.items():  # without an anchor, K changes nothing
        questions[title] = [row for row in rows if row[1] == 1 or models[row[0]].depths[0]]
    todo, found = {row for rows in questions.values() for row in rows}, defaultdict(list)
    with tqdm(total=len(todo) * seeds, unit="row") as bar:
        try:
            for seed in range(seeds):  # a seed visits all rows: the machine's moods hit all alike
                for name, K, T in sorted(todo):
                    found[name, K, T].append(measure(models[name], judge, tokenizer, x, n,
                                                     data.data == "stories", single, K, T, seed))
                    bar.update()
        except KeyboardInterrupt:
            seeds = min(len(found[row]) for row in todo)
            if seeds == 0:
                raise
    reference = next((name for name, m in models.items() if isinstance(m, tadm.ADLM)), args.compare[0])
    for title, rows in questions.items():
        table = [["model", "K", "T", *COLUMNS]]
        for name, K, T in rows:
            columns = [list(column) for column in zip(*found[name, K, T][:seeds])]
            columns[-1] = [v / r[-1] for v, r in zip(columns[-1], found[reference, 1, T])]
            table.append([name, str(K), str(T), *map(cell, columns, COLUMNS.values())])
        show(title, table, args.markdown)
        if args.markdown and rows[0][2] == rows[-1][2]:
            chart(title, {name: [sum(r[0] for r in found[name, K, 2 * L][:seeds]) / seeds
                                 for K in (1, 2, 4, 8)] for name in models if models[name].depths[0]})
    print(LEGEND.format(n=single, ref=reference, seeds=seeds,
                        error="; mean +- standard error" * (seeds > 1)))
    return 0


def show(title, table, markdown):
    """Print rows of strings, the first one the head, as plain columns or as Markdown."""
    width = [max(map(len, column)) for column in zip(*table)]
    print(f"\n{'### ' * markdown}{title}\n")
    for i, row in enumerate(table):
        row = [row[0].ljust(width[0]), *(c.rjust(w) for c, w in zip(row[1:], width[1:]))]
        print(f"| {' | '.join(row)} |" if markdown else "  ".join(row))
        if markdown and i == 0:
            print("|---" + "|--:" * (len(row) - 1) + "|")


def chart(title, lines):
    """Print a mermaid chart of the bound against K: one line per model, in the order given."""
    print(f'\n```mermaid\nxychart-beta\n  title "{title}"\n  x-axis "K" [1, 2, 4, 8]\n'
          '  y-axis "bound, nats/token"')
    for values in lines.values():
        print(f"  line [{', '.join(f'{v:.4f}' for v in values)}]")
    print("```\n\nLines, from the first (models with an anchor only): " + ", ".join(lines))


def run(argv):
    args = parse(argv)
    device = pick_device(args.device)
    if args.compare:
        return compare(args, device)
    model, tokenizer = build(load_checkpoint(args.checkpoint), device)
    if args.naive and not isinstance(model, tadm.PostTrained):
        raise UserError("--naive needs a post-trained model: leave it out")
    model.naive, seq_len = args.naive, model.config.seq_len
    if args.one_by_one and args.remask != "none":
        raise UserError("--remask needs a number of steps: leave --one-by-one out")
    steps = None if args.one_by_one else args.steps or 2 * seq_len
    prompt = prompt_canvas(args.prompt, tokenizer, seq_len)
    n_steps = steps or int((prompt == model.mask_id).sum())
    if args.svg and not args.svg.endswith(".svg"):
        raise UserError(f"--svg {args.svg}: the name must end in .svg")
    if args.svg and not 1 <= n_steps <= 1000:
        raise UserError(f"--svg draws 1 to 1000 steps, these are {n_steps}: choose other --steps")
    watch = None
    if args.watch or args.svg:
        watch = Watch(model, tokenizer, prompt.tolist(), n_steps, args.watch)
    begin = time.perf_counter()
    with explained("these options do not go together", ValueError):
        z, stats = tadm.sample(
            model, args.num, seq_len, steps, args.refresh_every, prompt.to(device), args.remask,
            args.temperature, args.top_p, torch.Generator(device).manual_seed(args.seed),
            watch,
        )
    speed = per_second(z.numel(), begin + (watch.slept if watch else 0))
    for i, row in enumerate(z.tolist(), 1):
        print(f"[{i}] {tokenizer.decode(row)}\n")
    print(f"{stats['steps']} steps, {stats['anchor_calls']} anchor calls, "
          f"{stats['denoiser_calls']} denoiser calls, {speed:,.0f} tokens/s")
    if args.svg:
        anchors = f"K = {args.refresh_every}, {stats['anchor_calls']} anchor calls, " if watch.anchored else ""
        picture = svg(watch, f"{stats['steps']} reverse steps: {anchors}{stats['denoiser_calls']} denoiser calls"
                             + f" (of the {args.num} texts together)" * (args.num > 1))
        if len(picture) > 300_000:
            raise UserError(f"--svg: {len(picture) // 1000} KB are too much for a picture: lower --steps")
        write_file(args.svg, "--svg", lambda part: part.write_text(picture, encoding="utf-8"))
    return 0


def main(argv=None):
    return shielded(run, "sample.py", argv)


if __name__ == "__main__":
    sys.exit(main())
