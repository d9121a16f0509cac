"""Tests of tadm.py, train_toy.py and sample.py; a grader of other implementations of tadm.py.

    python -m pytest -q                                           # everything
    TADM_MODULE=my_tadm python -m pytest -q -k loss               # one group, of another module
    python test_tadm.py --blank corrupt_further > my_tadm.py      # tadm.py as homework
    python test_tadm.py --vectors out/vectors.npz                 # every number of a forward pass

Nothing is compared with an output of our own: the truth is a closed form, numpy in float64, the
enumeration of a tiny language, or an oracle that knows the exact posterior of its data.
A failing test names the equation to look at. Everything random is seeded; the tolerances are
several standard errors.
"""

import argparse
import ast
import collections
import contextlib
import copy
import difflib
import functools
import hashlib
import importlib.util
import inspect
import io
import itertools
import math
import os
import random
import re
import shlex
import signal
import socket
import subprocess
import sys
import traceback
import xml.etree.ElementTree
from pathlib import Path

import numpy as np
import pytest
import torch

import sample as sample_script
import tadm as ref
import train_toy as toy

# ------------------------------------------------------------------------------ the grader
# A test's name begins with its group. Tests of scripts, stories and text always use our tadm.py.

GROUPS = {  # what the tests of a group are about
    "forward": ["corrupt"],
    "further": ["corrupt_further"],
    "times": ["sample_times"],
    "refresh": ["refresh_steps"],
    "fusion": ["GatedFusion"],
    "model": ["Config", "TADM", "ADLM", "MDLM"],
    "loss": ["t_anelbo", "log_probs", "weighted_mean"],
    "bound": ["bound"],
    "schedule": ["remask_schedule"],
    "draw": ["draw_tokens"],
    "reverse": ["reverse_step", "choose_positions"],
    "sampler": ["sample", "layer_calls"],
    "cache": ["sample"],
    "paired": ["PairedFusion"],
    "split": ["PostTrained"],
    "rollout": ["rollout"],
    "distill": ["posttrain_loss"],
    "order": ["most_certain", "accept_by_entropy"],
    "uniform": ["UniformLM", "corrupt_uniform", "uniform_posterior", "uniform_nats", "uniform_loss",
                "uniform_bound", "uniform_step", "sample_uniform"],
}
NAMES = list(dict.fromkeys(itertools.chain(*GROUPS.values())))
NETWORKS = {"Config", "TADM", "ADLM", "MDLM", "PostTrained", "UniformLM"}


def stand_in(module, missing):
    """In place of what a module lacks: fails the test that calls it."""
    ours = getattr(ref, missing)
    call = inspect.signature(ours)
    what = f"{module} has no {missing}{call}: {inspect.getdoc(ours)}"

    def fail(*_, **__):
        pytest.fail(what, pytrace=False)

    return type(missing, (), {"__init__": fail, "__signature__": call})


def module_under_test():
    """The module TADM_MODULE, a name or a path."""
    name = os.environ.get("TADM_MODULE") or "tadm"
    try:
        if name.endswith(".py"):
            spec = importlib.util.spec_from_file_location("graded", name)  # no module's name
            module = importlib.util.module_from_spec(spec)
            sys.modules[module.__name__] = module  # dataclasses look there
            spec.loader.exec_module(module)
        else:
            module = importlib.import_module(name)
    except (Exception, SystemExit) as e:
        what = f"TADM_MODULE={name} cannot be imported: {type(e).__name__}: {e}"
        raise pytest.fail.Exception(what, pytrace=False) from e
    for missing in NAMES:
        if not callable(getattr(module, missing, None)):
            setattr(module, missing, stand_in(name, missing))
    return module


tadm = module_under_test()


@contextlib.contextmanager
def limited(test, seconds=10):
    """Stop a test after so many seconds of computing, and say where (on systems with SIGPROF)."""

    def stop(_, frame):
        stack = traceback.extract_stack(frame)
        place = next((f for f in reversed(stack) if f.filename == tadm.__file__), stack[-1])
        pytest.fail(f"{test} was stopped after {seconds} s in {place.name}, line {place.lineno}: "
                    "a loop without an end, or far too slow", pytrace=False)

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def called(function):
    """How: names, kinds and defaults, whatever the type hints. None for some builtins."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None
    return [(p.name, p.kind, p.default) for p in parameters]


def hands_off(function, title):
    """The function, with a check that it writes into no argument but confidence."""
    names = [name for name, *_ in called(function) or ()]

    def tensors(value):  # some canvases and caches are tuples
        return list(filter(torch.is_tensor, value if isinstance(value, tuple) else [value]))

    @functools.wraps(function)
    def checked(*args, **kwargs):
        given = dict(zip(names, args)) | kwargs
        before = {name: [x.clone() for x in tensors(value)] for name, value in given.items()}
        result = function(*args, **kwargs)
        for name, old in before.items():
            assert name == "confidence" or all(map(torch.equal, tensors(given[name]), old)), (
                f"{title} has written into its argument {name}: it must work on a copy")
        return result

    return checked


@pytest.fixture(autouse=True)
def one_thing_at_a_time(request, monkeypatch):
    """A test of one thing gets our version of the others: a wrong sampler cannot fail the loss.
    Exchanged are functions and fusions, where the module's are called in the same way as ours."""
    about = GROUPS.get(request.function.__name__.split("_")[1], ())
    for name in set(NAMES) - NETWORKS - set(about):
        ours = getattr(ref, name)
        if called(getattr(tadm, name)) in (None, called(ours)):
            monkeypatch.setattr(tadm, name, ours)
    for name in about:
        owner, parts = tadm, [name]
        if inspect.isclass(getattr(tadm, name)):
            owner, parts = getattr(tadm, name), ["forward", "refresh", "predict", "denoise"]
        for part in filter(functools.partial(hasattr, owner), parts):
            monkeypatch.setattr(owner, part, hands_off(getattr(owner, part), name))
    watched = about and tadm is not ref and hasattr(signal, "SIGPROF")
    with limited(request.node.name) if watched else contextlib.nullcontext():
        yield


def same_layout(theirs, ours):
    """Skip a test that needs our names of the weights, if most of a network have other names. A
    fusion's are told by its docstring."""
    network = hasattr(theirs, "refresh")
    theirs, ours = ({k: v.shape for k, v in m.named_parameters()} for m in (theirs, ours))
    if network and len(ours.keys() & theirs.keys()) < len(theirs) / 2:
        pytest.skip("weights are named otherwise than ours: compare with --vectors instead")
    differ = {name: ours.get(name) for name in ours | theirs if ours.get(name) != theirs.get(name)}
    assert not differ, f"the shapes of these weights should be {differ}"


# ------------------------------------------------------------------------------ oracles


def rng(seed=0):
    return torch.Generator().manual_seed(seed)


def close(actual, expected, tolerance, message):
    actual = float(actual.detach() if torch.is_tensor(actual) else actual)
    if not abs(actual - expected) <= tolerance:  # NaN is not close either
        wanted = f"{expected:.4f} +- {tolerance:.4f}"
        raise AssertionError(f"{message}: expected {wanted}, got {actual:.4f}")


def mean_is(values, truth, message):
    """The mean of independent values, or the share of True, within five standard errors."""
    n, share = values.numel(), values.dtype == torch.bool
    spread = math.sqrt(abs(truth * (1 - truth))) if share else float(values.std())
    close(values.double().mean(), truth, 5 * spread / math.sqrt(n) + 2 / n, message)


def repeats(draw):
    """Every random number comes from the generator, and it is used."""
    one, again, other = (draw(rng(seed)) for seed in (1, 1, 2))
    assert torch.equal(one, again), "all random numbers must come from the given generator"
    assert not torch.equal(one, other), "the given generator must be used"


def refuses(call, *cases):
    for case in cases:
        with pytest.raises(ValueError):
            call(**case)
            what = " ".join(str(case).split())[:99]
            pytest.fail(f"the docstring promises a ValueError for {what}")


class Spy:
    """A model that keeps what it is asked. logits: a function of z and cache."""

    def __init__(self, vocab_size, logits=None):
        self.mask_id = vocab_size
        self.logits = logits or (lambda z, cache: torch.zeros(*z.shape, vocab_size))
        self.refreshed, self.predicted, self.graded = [], [], []

    def refresh(self, z):
        self.refreshed.append(copy.deepcopy(z))
        self.graded.append(torch.is_grad_enabled())
        return z  # as PostTrained, which holds the canvas: nobody may write into it later

    def predict(self, z, cache):
        self.predicted.append(copy.deepcopy((z, cache)))
        self.graded.append(torch.is_grad_enabled())
        return self.logits(z, cache)


def posterior(data, vocab_size, stale=False):
    """The exact posterior of a data set (N, L): what a perfectly trained model predicts.
    It reads z, or (stale) only the cached canvas."""
    data = torch.tensor(data)
    one_hot = torch.nn.functional.one_hot(data, vocab_size).float()  # (N, L, V)

    def logits(z, cache):
        z = cache if stale else z
        fits = ((z[:, None] == data) | (z[:, None] == vocab_size)).all(dim=2).float()
        counts = torch.einsum("bn,nlv->blv", fits, one_hot)
        return (counts / counts.sum(dim=2, keepdim=True)).log().clamp_min(-1e4)  # finite

    return Spy(vocab_size, logits)


LANGUAGE = [[0, 1, 2, 0], [0, 1, 0, 1], [2, 2, 2, 0], [1, 0, 2, 2], [1, 0, 0, 1]]  # V = 3, L = 4
TWINS = [[0, 0], [1, 1]]  # entropy ln 2

KINDS = ("TADM", "ADLM", "MDLM")
SIZES = {"vocab_size": 11, "seq_len": 6, "d_model": 8, "n_heads": 2,
         "n_anchor": 2, "n_denoiser": 1}


def untrained(kind, module=ref, **sizes):
    torch.manual_seed(0)
    return getattr(module, kind)(module.Config(**SIZES | sizes))


def shaken(network, size=0.3):
    """The network with noise on all of its weights that train."""
    torch.manual_seed(1)
    with torch.no_grad():
        for p in network.parameters():
            p.add_(size * torch.randn_like(p) * p.requires_grad)
    return network


def random_model(kind, module=ref, **sizes):
    return shaken(untrained(kind, module, **sizes))


def idle(named_parameters):
    """The names of those that no gradient has reached."""
    return [name for name, p in named_parameters if p.grad is None or not p.grad.any()]


def count_layers(blocks):
    """A list that grows by one whenever one of these runs."""
    ran = []
    for block in blocks:
        block.register_forward_hook(lambda *_: ran.append(1))
    return ran


# ---------------------------------------------------------------------- numpy, float64


def weights(module):
    return {k: v.detach().double().numpy() for k, v in module.state_dict().items()}


def np_norm(w, name, x):
    x = x - x.mean(-1, keepdims=True)
    x = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5)
    return x * w.get(f"{name}.weight", 1) + w.get(f"{name}.bias", 0)


def np_linear(w, name, x):
    return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0)


def np_sigmoid(x):
    return 1 / (1 + np.exp(-x))


def np_gelu(x):
    return x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))) / 2


def np_softmax(x):
    return np.exp(x) / np.exp(x).sum(-1, keepdims=True)


def np_attention(q, k, v):
    return np_softmax(q @ k.swapaxes(-1, -2) / math.sqrt(q.shape[-1])) @ v


def np_fusion(w, c, h, at=""):
    """Eq. 57-59 with the names of the paper. Returns all of its parts."""
    u = np.concatenate([np_norm(w, f"{at}norm_c", c), np_norm(w, f"{at}norm_h", h)], -1)
    gate = np_sigmoid(np_linear(w, f"{at}gate", u))
    delta = np_linear(w, f"{at}down", np_gelu(np_linear(w, f"{at}up", u)))
    h_fused = np_norm(w, f"{at}norm_out", h + gate * delta)
    return {"c": c, "h": h, "gate": gate, "delta": delta, "h_fused": h_fused}


def np_block(w, at, x, n_heads, scale):
    L, d = x.shape
    half = d // n_heads // 2
    angle = np.arange(L)[:, None] * 10000.0 ** (-np.arange(half) / half)

    def rotate(u):  # as a complex number per pair of channels
        u = (u[..., :half] + 1j * u[..., half:]) * np.exp(1j * angle)
        return np.concatenate([u.real, u.imag], -1)

    qkv = np_linear(w, f"{at}qkv", np_norm(w, f"{at}norm_attn", x))
    q, k, v = qkv.reshape(L, 3, n_heads, 2 * half).transpose(1, 2, 0, 3)
    q, k = rotate(np_norm(w, f"{at}norm_q", q)), rotate(np_norm(w, f"{at}norm_k", k))
    y = np_attention(q, k, v).transpose(1, 0, 2).reshape(L, d)
    x = x + scale * np_linear(w, f"{at}out", y)
    y = np_gelu(np_linear(w, f"{at}up", np_norm(w, f"{at}norm_mlp", x)))
    return x + scale * np_linear(w, f"{at}down", y)


def np_model(w, kind, z, z_stale, n_heads, n_anchor, n_denoiser, **_):
    """Of one canvas z (L,) with the anchor of z_stale: the logits (Eq. 5, 7-10) and all before."""
    layers = {}

    def stack(name, x, n):
        for i in range(n):
            x = np_block(w, f"{name}.{i}.", x, n_heads, (n_anchor + n_denoiser) ** -0.5)
            layers[f"layer.{name}.{i}"] = x
        return x

    def embed(z):
        return w["token.weight"][z] + w["position"][: len(z)]

    if kind == "MDLM":
        x, parts = stack("blocks", embed(z), n_anchor + n_denoiser), {}
    else:
        h = stack("anchor", embed(z_stale), n_anchor)  # anchor_norm: only ADLM has its weights
        logits = np_linear(w, "anchor_head", np_norm(w, "anchor_norm", h))
        if kind == "TADM":
            parts = np_fusion(w, embed(z), h, "fusion.")
            x = parts["h_fused"]
        else:
            x = np_linear(w, "project", logits)
            parts = {"h": h, "projected": x}
        parts["anchor_logits"] = logits
        x = stack("denoiser", x, n_denoiser)
    return parts | layers | {"logits": np_linear(w, "head", np_norm(w, "norm", x))}


def np_paired_fusion(w, c, c_cached, h_cached, n_heads):
    """Eq. 48-54 in float64, one canvas (L, d), with the names of the paper."""

    def rms(x):
        return np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6)

    def mlp(name, x):
        x = np_linear(w, f"{name}.0", x)
        return np_linear(w, f"{name}.2", x * np_sigmoid(x))

    def phi(z, u):
        qkv = np_linear(w, "qkv", np.concatenate([z, u], -1))
        heads = [np.split(x, n_heads, -1) for x in np.split(qkv, 3, -1)]
        y = [np_attention(q, k, v) for q, k, v in zip(*heads)]
        r = z + np_linear(w, "out", np.concatenate(y, -1))
        return r + mlp("mlp", r)

    s_c, s_h = rms(c_cached), rms(h_cached)
    z, z_0 = np_linear(w, "reduce_c", c / s_c), np_linear(w, "reduce_c", c_cached / s_c)
    u = np_linear(w, "reduce_h", h_cached / s_h)
    m = phi(z, u) - phi(z_0, u)
    g = np_sigmoid(mlp("gate", np.concatenate([u, z_0, z - z_0, m], -1)))
    h_fused = h_cached + g * s_h * np_linear(w, "up", m)
    states = {"c": c, "c_cached": c_cached, "h_cached": h_cached}
    return states | {"m": m, "gate": g, "h_fused": h_fused}


def np_ce(logits, x, masked, t):
    """The terms of Theorem 5.1: cross-entropy / t where masked, else 0, all (B, L)."""
    p = np.take_along_axis(np_softmax(logits), x[..., None], 2)[..., 0]
    return np.where(masked, -np.log(p), 0) / t[:, None]


# --------------------------------------------------------------------------- fusion, models


def test_fusion_against_numpy():
    fusion = tadm.GatedFusion(6)
    same_layout(fusion, ref.GatedFusion(6))
    c, h = torch.randn(2, 5, 6).requires_grad_(), (3 * torch.randn(2, 5, 6)).requires_grad_()
    start, truth = fusion(c * 1, h * 1), torch.nn.functional.layer_norm(h, (6,))
    assert torch.allclose(start, truth, atol=1e-5), "Eq. 59: LN(h) at first, as W_2 = 0, b_2 = 0"
    (start * torch.randn(6)).sum().backward()
    left = idle([("W_2, which starts at zero but must learn", fusion.down.weight), ("h", h)])
    assert not left, f"Eq. 58-59: no gradient reaches {left}"
    got = shaken(fusion, 1.0)(c * 1, h * 1)
    states = (v.detach().double().numpy() for v in (c, h))
    error = np.abs(got.detach().numpy() - np_fusion(weights(fusion), *states)["h_fused"]).max()
    assert error < 1e-4, (
        f"Eq. 57-59: h_fused = LN(h + g * Delta) is off by {error:.2g}. Look at: the order in u, "
        "c first; the sigmoid of the gate, GELU, the three LN; h, not LN(h), is corrected")
    (got * torch.randn(6)).sum().backward()
    left = idle([("c", c), ("h", h), *fusion.named_parameters()])
    assert not left, f"Eq. 57-59: no gradient reaches {left}"


@pytest.mark.parametrize("kind,sees", [("TADM", "z_t and the cached canvas"), ("MDLM", "only z_t"),
                                       ("ADLM", "only the cached canvas")])
def test_model_against_numpy(kind, sees):
    model = random_model(kind, tadm)
    same_layout(model, untrained(kind))
    ran = count_layers(m for m in model.modules() if isinstance(m, tadm.Block))
    rows = torch.tensor([[3, 11, 0, 10, 11, 7], [3, 11, 11, 11, 11, 7]])
    for length in (4, 6):
        z, z_stale = rows[:, :length]
        truth = np_model(weights(model), kind, z.numpy(), z_stale.numpy(), **SIZES)
        ran.clear()
        cache = model.refresh(z_stale[None])
        refreshed = len(ran)
        got = {"logits": model.predict(z[None], cache)}
        depths = refreshed, len(ran) - refreshed
        assert model.depths == depths, f"Eq. 11: {kind} ran {depths} layers, not {model.depths}"
        if kind != "MDLM":
            got["anchor_logits"] = model.anchor_logits(cache)
        for name, logits in got.items():
            assert logits.shape == (1, length, 11), f"SUBS: {name} are over the V real tokens"
            error = np.abs(logits[0].detach().numpy() - truth[name]).max()
            assert error < 1e-3, (
                f"Eq. 5, 8, 10: {name} of {kind}, whose denoiser sees {sees}, are off by "
                f"{error:.2g}; compare layer by layer with the arrays of --vectors")
    sum(logits.square().sum() for logits in got.values()).backward()
    left = idle(model.named_parameters())
    assert not left, f"Eq. 7-10: no gradient reaches {left} of {kind}"
    long = torch.zeros(1, 7).long()
    refuses(lambda z: (model.refresh(z), model.predict(z, cache)), {"z": long})


def test_model_sizes_and_start():
    refuses(lambda **sizes: tadm.Config(**SIZES | sizes), {"n_heads": 3}, {"d_model": 6},
            {"d_model": 0}, {"n_anchor": -1}, {"n_anchor": 0, "n_denoiser": 0})
    z = torch.zeros(1, 6).long()
    assert untrained("MDLM", tadm, n_anchor=0).refresh(z) is None, "n_anchor may be 0"
    sizes = {"vocab_size": 500, "seq_len": 500}
    model = untrained("TADM", tadm, **sizes)
    same_layout(model, untrained("TADM", **sizes))
    close(model.token.weight.std(), 0.8, 0.05, "large initial embeddings: standard deviation")
    close(model.position.std(), 0.05, 0.005, "small initial positions, standard deviation")
    assert (model.norm.weight == 8).all(), "the final norm's gain starts at 8"


# ------------------------------------------------------------------------------ training


def test_forward_masks_a_share_t():
    x, t = torch.zeros(4, 20_000).long(), torch.tensor([0.0, 0.3, 0.9, 1.0])
    z = tadm.corrupt(x, t, 7, rng())
    assert z.dtype == x.dtype and z.shape == x.shape, "Eq. 1: tokens stay (B, L) int64"
    assert set(z.unique().tolist()) == {0, 7}, "Eq. 1: a token stays or becomes the mask"
    for row, share in zip(z, (0, 0.3, 0.9, 1)):
        mean_is(row == 7, share, f"Eq. 1: masked share at t = {share} is 1 - alpha_t = t")
    few = tadm.corrupt(torch.zeros(2000, 50).long(), torch.full((2000,), 0.3), 7, rng()) == 7
    for which, dim in (("row", 1), ("column", 0)):
        spread = math.sqrt(0.21 / few.shape[dim])
        close(few.float().mean(dim).std(), spread, 0.6 * spread, "Eq. 1: each token is masked by "
              f"itself; spread of the masked share of a {which}")
    repeats(lambda g: tadm.corrupt(x, t, 7, g))


def test_further_hides_more_of_the_same_canvas():
    t, t_stale = torch.tensor([[0.3, 0.0, 0.999, 1.0], [0.5, 0.5, 1.0, 1.0]])
    z = ref.corrupt(torch.arange(40_000).expand(4, -1) % 7, t, 7, rng())
    z_stale = tadm.corrupt_further(z, t, t_stale, 7, rng(1))
    assert ((z_stale == z) | (z_stale == 7)).all() and (z_stale[3] == 7).all(), (
        "Eq. 15: z_t' is made from z_t, not anew from x; at t = 1 nothing is visible")
    for row, seen, share in zip(z_stale, z, (2 / 7, 0.5, 1)):
        mean_is(row[seen != 7] == 7, share, "Eq. 15: a visible token is masked with "
                "1 - alpha_t' / alpha_t, each with a draw of its own")
    same = tadm.corrupt_further(z, t, t, 7, rng(1))
    assert torch.equal(same, z), "Eq. 15: age 0 gives z_t' = z_t"
    repeats(lambda g: tadm.corrupt_further(z, t, t_stale, 7, g))
    refuses(tadm.corrupt_further, {"z_t": z, "t": t, "t_stale": t - 0.1, "mask_id": 7})


@pytest.mark.parametrize("B", [8, 2])
def test_times_of_a_batch(B):
    """Nothing may hang on the stratum, which is one of few numbers in batches of two."""
    batches = [tadm.sample_times(B, [1, 4], [10, 1000], rng(i)) for i in range(24_000 // B)]
    t, t_stale = map(torch.stack, zip(*batches))
    assert t.min() >= 1e-3 and t.max() <= 1, f"C.2: t ~ U(1e-3, 1), not from {t.min()}"
    place = (t - 1e-3) / (1 - 1e-3) * B
    strata = place.floor().clamp(0, B - 1).sort(dim=1).values
    assert (strata == torch.arange(B)).all(), "C.2: one t in each of B equal strata"
    for row in range(B):
        mean_is(t[:, row], 0.5, f"C.2: row {row} must meet all strata")
    assert (t_stale >= t).all() and t_stale.max() <= 1, "C.2: t' = min(1, t + k/T)"
    inside = t < 0.69  # no clamping there: at most 3/10
    shift = (t_stale - t)[inside]
    shares = {0: 0.5 + 0.5 / 4} | {k / T: 1 / 16 for k in (1, 2, 3) for T in (10, 1000)}
    for value, share in shares.items():
        mean_is((shift - value).abs() < 1e-5, share, "C.2: t' = t + k/T, with its own K, T and "
                f"k < K in each row; share of t' - t = {value}, K is 1 or 4, T is 10 or 1000")
    mean_is((place % 1)[t < 0.5], 0.5, "C.2: within its stratum t is uniform")
    for what, value in (("t", t), ("the half that t is in", (t > 0.5005).float()),
                        ("the place of t in its stratum", place % 1)):
        r = torch.corrcoef(torch.stack([value[inside], shift]))[0, 1]
        close(r, 0, 5 / math.sqrt(len(shift)), f"C.2: K, T, k hang on {what}; correlation")
    repeats(lambda g: torch.stack(tadm.sample_times(40, [1, 4], [10, 1000], g)))


@pytest.mark.parametrize("steps,K,log", [
    (10, 4, [0, 2, 5]), (10, 20, [0]), (9, 3, [0, 1, 4]), (8, 4, [0, 2]), (2, 1, [0, 1]),
    (12, 2, [0, 1, 2, 3, 6, 8])])
def test_refresh_by_hand(steps, K, log):
    """v_k = 0.2 * 6^(k/n) - 0.2: for n = 3 0.163, 0.460; for n = 2 0.290; for n = 6 0.070, 0.163,
    0.290, 0.460, 0.690; times T, rounded; a step that is taken moves on."""
    even = list(range(0, steps, K))
    for what, due in (((steps, K), even), ((steps, K, "even"), even), ((steps, K, "log"), log)):
        got = list(tadm.refresh_steps(*what))
        assert got == due, f"Algorithm 1, T, K{what}: computed at {got}, due at {due}"


def test_refresh_has_as_many_anchors_either_way():
    for T, K in itertools.product((1, 2, 3, 7, 16, 67, 200), (1, 2, 3, 8, 16, 300)):
        log = list(tadm.refresh_steps(T, K, "log"))
        increases = all(a < b for a, b in itertools.pairwise([-1, *log, T]))
        assert len(log) == -(-T // K) and log[0] == 0 and increases, f"log, T = {T}, K = {K}: {log}"
    refuses(lambda call: tadm.refresh_steps(*call), {"call": (0, 1)}, {"call": (5, 0)},
            {"call": (5, 1, "odd")})


@pytest.mark.parametrize("gamma", [0.0, 0.7])
def test_loss_is_recomputed_from_the_canvases(gamma):
    """The definition, in float64, on the canvases that the loss itself drew."""
    g, V = rng(3), 5
    x = torch.randint(0, V, (6, 9), generator=g)
    t, t_stale = torch.linspace(0.1, 0.9, 6), torch.linspace(0.3, 1.0, 6)
    table, anchor = torch.randn(2, V + 1, V, generator=g).bfloat16()

    model = Spy(V, lambda z, cache: table[cache.roll(1, dims=1)])
    model.anchor_logits = lambda cache: anchor[cache.roll(1, dims=1)]
    repeats(lambda g: tadm.t_anelbo(model, x, t, t_stale, gamma, generator=g))
    loss = tadm.t_anelbo(model, x, t, t_stale, gamma, generator=g)
    z_t, z_stale = model.predicted[-1]
    assert torch.equal(model.refreshed[-1], z_stale), "the cache must be what refresh returned"
    hidden, stale = (z_t == V).numpy(), (z_stale == V).numpy()
    assert stale[hidden].all(), "Eq. 15: z_t' shows what z_t hides: are they swapped?"
    left, x, t, t_stale = (v.numpy() for v in (z_stale.roll(1, dims=1), x, t, t_stale))
    table, anchor = (v.double().numpy() for v in (table, anchor))
    truth = np_ce(table[left], x, hidden, t).mean()
    truth += gamma * np_ce(anchor[left], x, stale, t_stale).mean()
    close(loss, truth, 1e-4, "Theorem 5.1: sum of CE / t where z_t is masked, per B * L tokens; "
          f"plus gamma = {gamma} times the same for the anchor, with z_t' and t'. Look at: the "
          "denominator, t or t', which masks, float32 for logits in bfloat16")


def test_loss_without_masks_and_with_nan():
    model, x = random_model("TADM"), torch.zeros(2, 6).long()
    none, half = torch.zeros(2), torch.full((2,), 0.5)
    loss = tadm.t_anelbo(model, x, none, half, generator=rng())
    loss.backward()
    finite = all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
    assert loss == 0 and finite, "Theorem 5.1: nothing is masked: the loss is 0, not 0 / 0"
    tadm.t_anelbo(model, x, half, half, 1.0, rng()).backward()
    left = idle(model.named_parameters())
    assert not left, f"Theorem 5.1: with gamma > 0 no gradient reaches {left}"
    z, cache = torch.tensor([[0, 11, 11, 2, 1, 11], [11] * 6]), model.refresh(x)
    truth = model.predict(z, cache)[z == 11].log_softmax(-1)
    assert torch.allclose(tadm.log_probs(model, z, cache), truth, atol=1e-5), (
        "SUBS: log softmax of the masked logits, row by row")
    broken = Spy(3, lambda z, cache: torch.where(z == 3, 0.0, math.nan)[..., None].expand(2, 6, 3))
    assert tadm.t_anelbo(broken, x, half, half, generator=rng()).isfinite(), (
        "a NaN at a visible place reaches the loss: select the masked, don't multiply")


def test_bound_of_an_oracle_is_the_entropy():
    x = torch.tensor(LANGUAGE).repeat(2000, 1)
    nats = tadm.bound(posterior(LANGUAGE, 3), x, None, generator=rng(), draws=4)
    assert nats.shape == (len(x),), "one value per row"
    mean_is(nats, math.log(5) / 4, "Theorem 5.1, T -> infinity: the entropy of the data. "
            "Look at: the weight L/n of n masks, and n = L being as likely as the others")
    call = functools.partial(tadm.bound, random_model("TADM"), x[:20])
    repeats(lambda g: call(10, 4, generator=g))
    repeats(lambda g: call(None, generator=g))
    plain, fresh = (call(10, *K, generator=rng()) for K in ((), (1,)))
    assert torch.equal(plain, fresh), "refresh_every is 1 unless given"
    assert not plain.requires_grad, "an evaluation has no gradients"
    refuses(call, {"steps": 0}, {"steps": 2, "refresh_every": 0}, {"steps": 2, "draws": 0})


@pytest.mark.parametrize("T,K,spacing", [(1, 1, "even"), (4, 1, "even"), (4, 3, "even"),
                                         (16, 4, "even"), (5, 8, "even"), (12, 6, "log")])
def test_bound_of_t_steps_in_closed_form(T, K, spacing):
    """Twins 00, 11: a masked token costs ln 2 exactly if the other one is masked too.
    Step i has two tokens, weight 1/i, P(masked) = i/T. A predictor that reads z_t finds the other
    one masked with probability i/T; one that reads only the anchor, with t' of the step at which
    the anchor was computed. The teacher, who reads z_t, is sure in the difference of the two."""
    x = torch.tensor(TWINS).repeat(3000, 1)
    due = ref.refresh_steps(T, K, spacing)
    t = sum(1 - j / T for j in range(T))
    t_stale = sum(1 - max(d for d in due if d <= j) / T for j in range(T))
    fresh, stale, teacher = (posterior(TWINS, 2, stale) for stale in (False, True, False))
    for name, model, truth, options in (("fresh", fresh, t, {}), ("stale", stale, t_stale, {}),
                                        ("KL", stale, t_stale - t, {"teacher": teacher})):
        nats = tadm.bound(model, x, T, K, rng(), spacing=spacing, **options)
        mean_is(nats, truth * math.log(2) / T, f"Theorem 5.1, {name}, T = {T}, K = {K}, {spacing}: "
                f"weight 1/i, anchors of the steps {due}; with a teacher KL(teacher || model)")
    for (z, cache), (seen, own) in zip(stale.predicted[-8:], teacher.predicted):
        assert (cache[z == 2] == 2).all(), "Eq. 15: z_t' hides what z_t hides"
        assert torch.equal(z, seen) and torch.equal(z, own), "the teacher sees all of z_t"
    for model in (stale, teacher):
        assert len(model.refreshed) == len(model.predicted), "Eq. 8: the cache is from refresh"


# ------------------------------------------------------------------------------ sampling


@pytest.mark.parametrize("alpha_t,alpha_s,sigma,cut", [
    (0.2, 0.5, 0, 0), (0.4, 0.6, 0.3, 0.3), (0.6, 0.7, 0.5, 0.5), (0.0, 0.3, 0.5, 0.5),
    (0.8, 0.9, 1.0, 0.125), (0.1, 0.2, 5.0, 1), (0.1, 0.2, -0.5, 0), (0.5, 0.5, 0, 0),
    (0.0, 1.0, 0, 0), (0.3, 1.0, 0.3, 0), (0.999, 1.0, 0.3, 0)])
def test_reverse_step_frequencies(alpha_t, alpha_s, sigma, cut):
    """cut: sigma within 0 and its largest valid value, (1 - alpha_s) / alpha_t."""
    n, p = 60_000, [0.5, 0.3, 0.2]
    z = torch.tensor([[3] * n, [0] * n])  # row 0 masked, row 1 visible
    fixed = (torch.arange(n) % 2 == 0).expand(2, n)
    logits = torch.tensor(p).log().expand(2, n, 3)
    new = tadm.reverse_step(z, logits, alpha_t, alpha_s, sigma, 3, fixed=fixed, generator=rng())
    reveal = (alpha_s - (1 - cut) * alpha_t) / (1 - alpha_t)
    what = f"Eq. 17, alpha {alpha_t} to {alpha_s}, sigma = {sigma}"
    mean_is(new[0] != 3, reveal, f"{what}: share of the masks that are revealed")
    assert alpha_s < 1 or (new[0] != 3).all(), f"{what}: a mask is left at alpha_s = 1"
    for token in range(3):
        mean_is(new[0] == token, reveal * p[token], f"{what}: share of masks that become {token}")
    mean_is(new[1, 1::2] == 3, cut, f"{what}: share of tokens that are remasked")
    assert (new[1, ::2] == 0).all(), "Eq. 17: tokens of a prompt (fixed) are never remasked"
    assert set(new[1].unique().tolist()) <= {0, 3}, "Eq. 17: a visible token stays or is masked"


def test_reverse_step_by_confidence():
    """sigma times a softmax of minus the confidences of tokens that are visible and not fixed."""
    n = 60_000
    z = torch.tensor([0, 0, 0, 3, 0, 0]).repeat(n, 1)
    z[::2] = 3  # nothing is visible
    confidence = torch.tensor([0.9, 0.5, 0.1, 0.0, 0.0, 0.3]).repeat(n, 1)
    fixed = (torch.arange(6) == 4).repeat(n, 1)
    new = tadm.reverse_step(z, torch.zeros(n, 6, 3), 0.4, 0.5, 0.8, 3, fixed=fixed,
                            confidence=confidence, generator=rng())
    weight = np.exp([-0.9, -0.5, -0.1, -math.inf, -math.inf, -0.3])
    for place in (0, 1, 2, 4, 5):
        share = 0.8 * weight[place] / weight.sum()
        mean_is(new[1::2, place] == 3, share, f"ReMDM, conf: token {place} is remasked with "
                "sigma * softmax(-confidence) over the visible tokens that are not fixed")
    for what, masks in (("a masked token", new[1::2, 3]), ("nothing visible", new[::2])):
        mean_is(masks != 3, 0.1 / 0.6, f"Eq. 17, conf: {what}: sigma = 0")


def test_reverse_step_is_where_and_then_what():
    """choose_positions alone finds the places where a step with the same randomness acts."""
    g, step = rng(), (0.3, 0.6, 0.9)
    z, logits = torch.randint(0, 4, (50, 40), generator=g), torch.randn(50, 40, 3, generator=g)
    fixed, confidence = torch.rand(50, 40, generator=g) < 0.3, torch.full((50, 40), 9.0)
    where = tadm.choose_positions(z, *step, 3, fixed, confidence.clone(), rng(1))
    new = tadm.reverse_step(z, logits, *step, 3, fixed=fixed, confidence=confidence,
                            temperature=3.0, top_p=0.0, generator=rng(1))
    reveal, remask = (z == 3) & (new != 3), (z != 3) & (new == 3)
    assert reveal.any() and remask.any() and all(map(torch.equal, where, (reveal, remask))), (
        "Eq. 17: choose_positions returns reveal and remask, where a step does that")
    prob, likeliest = (logits / 3).softmax(-1).max(-1)
    assert torch.equal(new[reveal], likeliest[reveal]), (
        "Eq. 17: each place has its own logits; with top_p = 0 the likeliest tokens come")
    assert torch.allclose(confidence, prob.where(reveal, torch.tensor(9.0))), (
        "ReMDM, conf: the probability of a token when it is revealed, at this temperature")
    repeats(lambda g: tadm.reverse_step(z, logits, *step, 3, generator=g))
    rows = torch.linspace(0.3, 0.6, 50)[:, None]
    bad = [(1.0, 1.0), (0.6, 0.5), (0.5, 1.5), (-0.1, 0.5), (rows, 0.5), (0.5, rows),
           (rows, 2 * rows)]
    refuses(lambda alphas: tadm.reverse_step(z, logits, *alphas, 0.0, 3),
            *({"alphas": alphas} for alphas in bad))


def test_reverse_step_of_a_large_vocabulary(monkeypatch):
    """V = 50257, reveals of 1/1024, random numbers of 24 bits, made small: 64, 1/64, 10 bits."""
    rand, n = torch.rand, 40_000

    def coarse(*size, **options):
        return (rand(*size, **options) * 1024).floor() / 1024

    monkeypatch.setattr(torch, "rand", coarse)
    z, logits = torch.full((1, n), 64), torch.zeros(1, n, 64)
    z = tadm.reverse_step(z, logits, 0.0, 1 / 64, 0.0, 64, generator=rng())
    mean_is(z != 64, 1 / 64, "Eq. 17: share revealed with 1/64 if random numbers have 10 bits. "
            "Look at: one Gumbel draw over V + 1 outcomes (first decide whether, then draw which)")


@pytest.mark.parametrize("kind", ref.REMASK)
@pytest.mark.parametrize("eta", [None, 0.06])
def test_schedule_in_closed_form(kind, eta):
    """Of ReMDM. loop: alpha rises to 0.9 at t = 0.55, is flat to 0.05, and rises to 1."""
    rate = eta or (0.02 if kind == "loop" else 0.04)
    last = 0.0
    for i in range(40, 0, -1):
        t, s = i / 40, (i - 1) / 40
        alphas = 1 - t, 1 - s
        if kind == "loop":
            alphas = np.interp([t, s], [0, 0.05, 0.55, 1], [1, 0.9, 0.9, 0])
        sigma_max = min(1, s / (1 - t)) if i < 40 else 1  # (1 - alpha_s) / alpha_t
        sigma = {"none": 0, "cap": min(rate, sigma_max), "rescale": rate * sigma_max,
                 "conf": sigma_max, "loop": rate * (s >= 0.05 and t <= 0.55)}
        got, truth = tadm.remask_schedule(kind, t, s, eta=eta), (*alphas, sigma[kind])
        assert got == pytest.approx(truth, abs=1e-9), f"ReMDM, {kind}, step from t = {t} to {s}"
        assert got[0] == last, "alpha at one step's end starts the next, exactly"
        last = got[1]
    assert last == 1, "alpha_0 = 1"


def test_schedule_at_and_beyond_its_limits():
    """Of t = 0.5 to 0.4: sigma_max is 0.8; loop's eta is at most (1 - alpha_on) / alpha_on."""
    for kind, options, truth in (("rescale", {"eta": 1}, (0.5, 0.6, 0.8)),
                                 ("rescale", {"eta": 0}, (0.5, 0.6, 0)),
                                 ("loop", {"eta": 0.1, "alpha_on": 0.9}, (0.9, 0.9, 0.1)),
                                 ("loop", {"eta": 1, "alpha_on": 0.5}, (0.5, 0.5, 1))):
        got = tadm.remask_schedule(kind, 0.5, 0.4, **options)
        assert got == pytest.approx(truth), f"ReMDM, {kind}, {options}: t = 0.5 to 0.4"
    call = functools.partial(tadm.remask_schedule, t=0.5, s=0.4)
    refuses(call, {"kind": "never", "eta": 0.1}, {"kind": "cap", "eta": -0.1},
            {"kind": "rescale", "eta": 1.1})
    refuses(functools.partial(call, kind="loop"), {"t_on": 1.0}, {"t_off": 0.6}, {"t_off": 0.55},
            {"t_off": 0.0}, {"eta": 0.5}, *({"alpha_on": on, "eta": 0.0} for on in (0.0, 1.0)))


@pytest.mark.parametrize("temperature,top_p,kept", [
    (1, 0.0, [1]), (1, 0.4, [1]), (1, 0.6, [1, 3]), (1, 0.81, [1, 3, 0]), (1, 1.0, [1, 3, 0, 2]),
    (0, 1.0, [1]), (0, 0.9, [1]), (0.5, 1.0, [1, 3, 0, 2]), (2.0, 0.8, [1, 3, 0])])
def test_draw_with_temperature_and_nucleus(temperature, top_p, kept):
    p = torch.tensor([0.15, 0.5, 0.05, 0.3])
    ids, prob = tadm.draw_tokens(p.log().expand(20_000, 4), temperature, top_p, rng())
    p = p ** (1 / (temperature or 1))
    p = p / p.sum()
    what = f"temperature {temperature}, nucleus {top_p}"
    assert torch.allclose(prob, p[ids]), f"{what}: the probability is that before the nucleus"
    for i in range(4):
        share = float(p[i] / p[kept].sum()) if i in kept else 0
        mean_is(ids == i, share, f"{what}, keeps {kept}: share of token {i}")


def test_draw_is_softmax_in_float32_unless_told_otherwise():
    logits = torch.randn(30, generator=rng()).bfloat16().expand(40_000, 30)
    (ids, prob), truth = tadm.draw_tokens(logits, generator=rng()), logits[0].double().softmax(-1)
    mean_is(truth[ids], float(truth.square().sum()), "softmax(logits) is the default")
    assert torch.allclose(prob.double(), truth[ids], rtol=1e-4), "probabilities are float32"
    repeats(lambda g: tadm.draw_tokens(logits, generator=g)[0])
    ids, _ = tadm.draw_tokens(torch.zeros(2000, 4), 1.0, 0.5, rng())
    assert len(ids.unique()) == 2, "nucleus 1/2 of four equal tokens: two reach it"


def recorded(model, batch_size, seq_len, steps, refresh_every=1, **options):
    """A run of the sampler: z, stats, and (before, after, age) of every step."""
    rows = []

    def callback(step, z, age):
        assert step == len(rows), "callback(step, z, age): steps are counted from 0"
        before = rows[-1][1] if rows else torch.full_like(z, model.mask_id)
        rows.append((before, z.clone(), age))

    z, stats = tadm.sample(model, batch_size, seq_len, steps, refresh_every, generator=rng(),
                           callback=callback, **options)
    assert stats["steps"] == len(rows), "callback(step, z, age) is called after each step"
    assert not rows or torch.equal(z, rows[-1][1]), "callback(step, z, age): z is the new canvas"
    return z, stats, rows


@pytest.mark.parametrize("remask,options,order", [
    ("none", {}, "random"), ("none", {}, "confidence"), ("cap", {"eta": 0.2}, "random"),
    ("rescale", {"eta": 0.5}, "random"), ("loop", {}, "random"),
    ("loop", {"eta": 0.1, "t_on": 0.7, "t_off": 0.2, "alpha_on": 0.8}, "random")])
def test_sampler_steps_as_remask_says(remask, options, order):
    T = 12
    _, _, rows = recorded(Spy(3), 300, 200, T, 2, remask=remask, order=order, **options)
    for j, (before, after, _) in enumerate(rows):
        t, s = (T - j) / T, (T - j - 1) / T
        _, alpha_s, sigma = ref.remask_schedule(remask, t, s, **options)
        what = f"Algorithm 1, remask = {remask}, {options}, step from t = {t:.2f} to {s:.2f}"
        mean_is(after == 3, 1 - alpha_s, f"{what}: masked share 1 - alpha_s")
        if j > 0:
            gone = after[before != 3] == 3
            mean_is(gone, sigma, f"{what}: share of visible tokens that is remasked, sigma")


def test_sampler_conf_remasks_the_doubtful():
    """Step 2 of 3 has sigma_max = 1, shared out by a softmax of minus the probabilities."""
    logits = torch.zeros(4, 2)
    logits[:2, 1] = -1e9  # sure (p = 1) left, a guess (p = 1/2) right
    model = Spy(2, lambda z, cache: logits.expand(*z.shape, 2))
    _, _, rows = recorded(model, 10_000, 4, 3, remask="conf")
    before, after, _ = rows[1]
    weight = (before != 2) * torch.tensor([-1.0, -1.0, -0.5, -0.5]).exp()
    share = weight / weight.sum(1, keepdim=True).clamp_min(1e-9)
    excess = ((before != 2) & (after == 2)).float() - share
    for half, name in ((excess[:, :2], "sure"), (excess[:, 2:], "doubtful")):
        mean_is(half.mean(1), 0, f"conf: share of {name} tokens, less the right one")


@pytest.mark.parametrize("steps,K,options", [
    (10, 4, {}), (10, 1, {}), (1, 3, {}), (60, 7, {}), (9, 3, {"spacing": "log"}),
    (10, 20, {"spacing": "log"}), (60, 7, {"remask": "cap", "temperature": 1.0, "top_p": 0.0})])
def test_cache_is_made_when_it_is_due(steps, K, options):
    """Algorithm 1 step by step, with the likeliest tokens of a table: from the token on the left,
    now and in the cache. A step that reveals nothing needs no prediction."""
    table = torch.randn(5, 5, 4, generator=rng())
    model = Spy(4, lambda z, cache: table[z.roll(1, dims=1), cache.roll(1, dims=1)])
    model.depths = (5, 2)
    _, stats, rows = recorded(model, 3, 6, steps, K, **{"temperature": 0} | options)
    skips = tadm is ref or stats["denoiser_calls"] < steps  # not to skip is right, but slow
    due = ref.refresh_steps(steps, K, options.get("spacing", "even"))
    anchors = []  # of each prediction, the step of its anchor
    for j, (before, after, age) in enumerate(rows):
        last = max(d for d in due if d <= j)
        saw, what = rows[last][0], f"Algorithm 1, T = {steps}, K = {K}, step {j}"
        assert age == j - last, f"{what}: its anchor is of step {last}, its age is not {age}"
        new, shown = (before == 4) & (after != 4), (before != 4) & (after != 4)
        assert torch.equal(after[shown], before[shown]), f"{what}: a visible token stays"
        if not new.any() and skips:
            continue
        z, cache = model.predicted[len(anchors)]
        assert torch.equal(z, before), f"{what} predicts from the canvas before"
        assert torch.equal(cache, saw), f"{what} uses the anchor of step {last}, then reused"
        likeliest = model.logits(before, saw).argmax(-1)
        assert torch.equal(after[new], likeliest[new]), f"{what}: what is revealed is predicted"
        anchors.append(last)
    n, calls = len(set(anchors)), len(anchors)
    assert len(model.refreshed) == n and len(model.predicted) == calls, f"Algorithm 1, due: {due}"
    assert stats == {"steps": steps, "anchor_calls": n, "denoiser_calls": calls,
                     "layer_calls": 5 * n + 2 * calls}, "stats, Eq. 11: the calls really made"


def test_sampler_one_by_one_reproduces_the_data():
    model = posterior(LANGUAGE, 3)
    z, _, rows = recorded(model, 2000, 4, None, 4)
    kept = all((cache == 3).all() for _, cache in model.predicted)
    assert kept, "the canvas of the only anchor is not written into"
    masks = [set((canvas == 3).sum(1).tolist()) for _, canvas, _ in rows]
    assert masks == [{3}, {2}, {1}, {0}], f"one token per step; masks left: {masks}"
    for place in range(4):
        first = rows[0][1][:, place] != 3
        mean_is(first, 1 / 4, "steps = None: the first token's place is uniform")
    for row in LANGUAGE:
        mean_is((z == torch.tensor(row)).all(1), 1 / 5, f"share of the text {row}")


@pytest.mark.parametrize("prompt,holes", [
    ([[0, 5, 2, 5, 5, 3, 5, 5]] * 20, 5),
    ([[0, 4, 2, 4, 4, 3, 4, 4]] * 20, 0),
    ([[0, 1, 2, 3, 4, 0, 1, 5], [5] * 8] * 10, 8)])
def test_sampler_holds_the_prompt_fixed(prompt, holes):
    told = torch.tensor(prompt)
    hidden = told == 5
    for steps, remask in ((None, "none"), *itertools.product((1, 2, 50), ref.REMASK)):
        given = told if holes == 8 else told[0]  # a prompt for each row, or one for all
        z, stats, rows = recorded(Spy(5), 20, 8, steps, 2, prompt=given, remask=remask)
        for canvas in [*(after for _, after, _ in rows), z]:
            assert torch.equal(canvas[~hidden], told[~hidden]), (
                f"Algorithm 1, remask = {remask}: the prompt was changed; it is held fixed")
        assert (z < 5).all(), f"Eq. 17: masks are left, T = {steps}, remask = {remask}"
        assert stats["steps"] == (steps or holes), "steps = None: one step per hidden token"
        assert len(z.unique(dim=0)) > 10 or holes == 0, "each canvas is drawn by itself"


def test_sampler_refuses_bad_values():
    right = {"batch_size": 1, "seq_len": 4, "steps": 2, "refresh_every": 1}
    prompts = [torch.zeros(3).long(), torch.tensor([0, 1, 2, 9]), torch.tensor([3, 1, -1, 2]),
               torch.ones(4)]
    refuses(lambda **bad: tadm.sample(Spy(3), **right | bad), *({name: 0} for name in right),
            {"temperature": -1}, {"temperature": math.nan}, {"temperature": math.inf},
            {"top_p": 1.5}, {"top_p": -0.5}, {"remask": "never"},
            {"steps": None, "remask": "cap"}, *({"prompt": prompt} for prompt in prompts),
            {"order": "best"}, {"order": "entropy", "budget": -1.0},
            {"order": "entropy", "remask": "cap"})


def test_sampler_defaults_and_statistics():
    tiny = random_model("TADM")  # a cache or canvas that survives a call would show
    for steps in (8, None):
        repeats(lambda g, steps=steps: tadm.sample(tiny, 2, 6, steps, 3, generator=g)[0])
    _, stats = tadm.sample(random_model("MDLM"), 2, 6, 8, generator=rng())
    assert stats["anchor_calls"] == 0, "MDLM has no anchor to call"
    assert stats["layer_calls"] == 3 * stats["denoiser_calls"], "Eq. 11 on the calls made"
    model = Spy(9)
    _, stats = tadm.sample(model, 50, 6, 4, generator=rng())
    assert not any(model.graded), "sampling records no gradients"
    assert stats["anchor_calls"] == 4, "refresh_every is 1 unless given"
    assert stats["layer_calls"] == 0, "a model that does not tell its depths has no layers"
    config = ref.Config(**SIZES | {"n_anchor": 5, "n_denoiser": 2})
    for steps, K, truth in ((10, 4, 10 * 2 + 3 * 5), (8, 1, 56), (1, 9, 7)):
        assert tadm.layer_calls(config, steps, K) == truth, "Eq. 11: T L_D + ceil(T / K) L_A"


# ------------------------------------------------------------------------------ post-training


@pytest.mark.parametrize("n_heads", [1, 4])
def test_paired_against_numpy(n_heads):
    fresh, fusion = (tadm.PairedFusion(6, 8, n_heads) for _ in range(2))
    same_layout(fusion, ref.PairedFusion(6, 8, n_heads))
    assert (fusion.gate[-1].bias == -3).all(), "Eq. 53: b_g starts at -3"
    w = weights(shaken(fusion))
    states = torch.randn(3, 2, 5, 6)  # c, c_cached, h_cached
    states[:2, 0, 0] *= 1e-3  # the epsilon of Eq. 48 counts here
    states[2] *= 3
    got = fusion(*states).detach().numpy()
    for i in range(2):
        truth = np_paired_fusion(w, *states[:, i].double().numpy(), n_heads)["h_fused"]
        error = np.abs(got[i] - truth).max()
        assert error < 1e-4, (
            f"Eq. 48-54: h_fused is off by {error:.2g}. Look at: the RMS scales (both of cached "
            "states), the order in J and F, the residual in R and phi, s_H in the result")
    c, c_cached, h = states
    assert torch.equal(fusion(c, c, h), h), "Eq. 55-56: C = C_0 gives M = 0, exactly H_0"
    assert torch.equal(fresh(c, c_cached, h), h), "Eq. 54: W_up = 0 gives exactly H_0"


@pytest.mark.skipif(tadm is not ref, reason="how weights start is our own choice")
def test_paired_starts_with_an_rms_of_1():
    fusion = tadm.PairedFusion(64, 40, 4)
    queries_and_keys, values = fusion.qkv.weight.split((80, 40))
    layers = fusion.reduce_c, fusion.reduce_h, fusion.out, fusion.mlp[0], fusion.mlp[2]
    for weight in (2 * queries_and_keys, values, *(layer.weight for layer in layers)):
        close(weight.std() * weight.shape[1] ** 0.5, 1, 0.06, "Eq. 49-51: an RMS of 1 is kept")


@pytest.mark.parametrize("naive", [False, True])
@pytest.mark.parametrize("n_shared,n_denoiser,steps,K", [(1, 1, 9, 3), (1, 2, 8, 1), (2, 1, 5, 9),
                                                         (0, 3, 9, 2)])
def test_split_is_the_base_with_a_corrected_anchor(n_shared, n_denoiser, steps, K, naive):
    """x_theta(z_t, z_t') put together from the layers of the base by hand, and these counted."""
    base = random_model("MDLM", tadm, n_anchor=3)
    fresh, student = (tadm.PostTrained(base, n_shared, n_denoiser, 4, naive=naive)
                      for _ in range(2))
    same_layout(fresh, ref.PostTrained(untrained("MDLM", n_anchor=3), 1, 1, 4))
    shaken(student)
    z_stale = torch.tensor([[11, 11, 3, 11, 11, 0], [11] * 6])
    z = torch.tensor([[1, 11, 3, 11, 2, 0], [11, 5, 11, 11, 11, 11]])
    first, last = base.blocks[:n_shared], base.blocks[4 - n_denoiser :]
    c, c_cached = first(base.embed(z)), first(base.embed(z_stale))
    h = base.blocks[n_shared : 4 - n_denoiser](c_cached)
    for model, fused in ((fresh, h), (student, h if naive else student.fusion(c, c_cached, h))):
        truth = base.read(last(fused))
        for guard in (torch.no_grad, torch.enable_grad):
            with guard():
                got = model.predict(z, model.refresh(z_stale))
            assert torch.allclose(got, truth, atol=1e-5), (
                f"Section 4: S, A, Phi, D with {n_shared} shared and {n_denoiser} last layers, "
                f"naive = {naive}; an untrained fusion (W_up = 0) is naive reuse")
    ran = count_layers(student.base.blocks)
    _, stats = tadm.sample(student, 40, 6, steps, K, generator=rng(4))
    assert stats["layer_calls"] == len(ran), "layer_calls must be those that ran"
    every_step = n_shared + n_denoiser
    truth = steps * every_step + -(-steps // K) * (4 - every_step)
    assert naive or len(ran) == truth, "Eq. 11: T (L_S + L_D) + ceil(T/K) L_A"


def test_split_learns_only_in_the_new_part():
    base = random_model("MDLM", tadm, n_anchor=3)
    refuses(lambda split: tadm.PostTrained(base, *split, 4),
            *({"split": split} for split in ((4, 0), (1, 3), (-1, 1), (1, 0), (3, 1))))
    student = tadm.PostTrained(base, 1, 1, 4)
    before = {k: v.clone() for k, v in student.state_dict().items()}
    x = torch.randint(0, 11, (16, 6), generator=rng())
    assert all(p.requires_grad for p in base.parameters()), "Section 4: what is frozen is a copy"
    for ages in ((0,), (0, 1, 2), (0, 1, 2)):
        assert torch.equal(student.predict(x, student.refresh(x)), base.predict(x, None)), "age 0"
        tokens = [tadm.sample(m, 5, 6, 9, 1, generator=rng(2))[0] for m in (student, base)]
        assert torch.equal(*tokens), "K = 1 is the teacher, bit for bit"
        tadm.posttrain_loss(student, base, x, 6, ages, generator=rng(1)).backward()
        with torch.no_grad():
            for p in student.parameters():
                p -= 0.1 * (0 if p.grad is None else p.grad)
    for name, p in student.named_parameters():
        inside = name.startswith("fusion.")
        what = f"Section 4: only the fusion trains, all else is frozen; look at {name}"
        assert (p.grad is not None) == p.requires_grad == inside, what
        assert torch.equal(p, before[name]) != inside, what


def test_rollout_makes_k_steps():
    """k steps of the sampler from the anchor's canvas, at t' = i_a / T: clip(floor(T t' + 1/2),
    k + 1, T)."""
    n, T = 6000, 10
    x, age = torch.randint(0, 3, (n, 100), generator=rng()), torch.arange(n) % 3
    repeats(lambda g: tadm.rollout(Spy(3), x[:9], age[:9], T, g)[0])
    refuses(lambda steps: tadm.rollout(Spy(3), x, age, steps), {"steps": 2})
    model = Spy(3)
    z, cache, t = tadm.rollout(model, x, age, T, rng(1))
    assert not any(model.graded), "Eq. 13: no gradients through the rollout"
    assert len(model.refreshed) == 1 and len(model.predicted) == 2, "one anchor, max(k) steps"
    (start,), ((first, used), (second, again)) = model.refreshed, model.predicted
    for what in (cache, used, again, first):
        assert torch.equal(what, start), "Eq. 13: one anchor, of the first canvas"
    assert torch.equal(second[age == 1], z[age == 1]), "step 2 goes on where step 1 ended"
    assert torch.equal(z[age == 0], start[age == 0]), "age 0: no step is made"
    new, shown = (z != start) & (start == 3), start != 3
    assert torch.equal(start[shown], x[shown]), "Eq. 1: the anchor's canvas is x with masks"
    assert torch.equal(z[shown], x[shown]), "sigma = 0 hides nothing visible"
    for token in range(3):
        mean_is(z[new] == token, 1 / 3, "Eq. 13: tokens are drawn as by the sampler")
    levels = t * T + age
    assert torch.allclose(levels, levels.round(), atol=1e-4), "Eq. 13: t' on the grid i/T"
    for k in range(3):
        expected = [0.05] + 9 * [0.1] + [0.05]  # of floor(T t' + 1/2) = 0..10
        expected[k + 1] += sum(expected[: k + 1])
        for i in range(k + 1, 11):
            got = levels[age == k].round() == i
            mean_is(got, expected[i], f"Eq. 13: share of i_a = {i} at age {k}")
        for canvas, when in ((start, levels / T), (z, t)):  # at the start, and after k steps
            excess = ((canvas == 3).float().mean(1) - when)[age == k]
            mean_is(excess, 0, f"Eq. 13: masked share less time, age {k}")


def test_distill_is_recomputed_from_its_states():
    """Eq. 14 in float64 on the states that the rollout reached. The masked share of a long canvas
    tells its time on the grid i / T."""
    g, V = rng(3), 5
    x = torch.randint(0, V, (600, 1000), generator=g)
    q, p = (torch.randn(V + 1, V, generator=g).requires_grad_() for _ in range(2))
    student = Spy(V, lambda z, cache: q[cache.roll(1, dims=1)])
    teacher = Spy(V, lambda z, cache: p[z.roll(1, dims=1)])
    plain, one, loss = (tadm.posttrain_loss(student, teacher, x, 6, generator=rng(3), **options)
                        for options in ({}, {"kd_weight": 1.0}, {"kd_weight": 0.7}))
    assert plain == one, "Eq. 14: lambda is 1 unless given"
    assert student.graded == 3 * [False, False, False, True], "Eq. 13: no gradients but the last"
    loss.backward()
    assert q.grad.any() and p.grad is None, "Eq. 14: only the student learns"
    z, z_stale = student.predicted[-1]
    for seen in (teacher.predicted[-1][0], teacher.refreshed[-1]):
        assert torch.equal(seen, z), "Eq. 14: the teacher and its anchor see z"
    t, t_stale = ((v == V).double().mean(1).mul(6).round() / 6 for v in (z, z_stale))
    for k in range(3):
        aged = (t_stale - t - k / 6).abs() < 1e-6
        mean_is(aged, 1 / 3, f"Eq. 13: share of rows whose anchor has age {k}")
    log_q, log_p = (v.detach().double().log_softmax(-1) for v in (q, p))
    log_q, log_p = log_q[z_stale.roll(1, dims=1)], log_p[z.roll(1, dims=1)]
    ce = np_ce(log_q.numpy(), x.numpy(), (z == V).numpy(), t.numpy()).mean()
    kl = (log_p.exp() * (log_p - log_q)).sum(-1)
    truth = ce + 0.7 * float((kl * (z == V) / t[:, None]).mean())
    close(loss, truth, 1e-4 * truth, "Eq. 14: sum over masked l of (CE + lambda KL(teacher || "
          "student)) / t, over B * L. Look at: the direction of the KL, t of the end state")
    repeats(lambda g: tadm.posttrain_loss(student, teacher, x[:8], 6, generator=g))


# --------------------------------------------------------------------- order, uniform state


def test_order_against_all_prefixes():
    """The rule by brute force: the longest prefix, in order of entropy, that the budget allows."""
    logits = 4 * torch.randn(40, 7, 5, generator=rng())
    allowed = torch.rand(40, 7, generator=rng(1)) < 0.7
    allowed[0], allowed[1:9] = False, True
    p = logits.double().softmax(-1)
    entropy, likeliest = -(p * p.log()).sum(-1), p.amax(-1)

    def ranked(row, key):
        return sorted(allowed[row].nonzero()[:, 0].tolist(), key=lambda place: key[row, place])

    for budget in (0.0, 0.3, 2.0, math.inf):
        got = tadm.most_certain(logits, allowed, "entropy", budget=budget)
        alone = tadm.accept_by_entropy(entropy[1:9].float(), budget)
        assert torch.equal(alone, got[1:9]), "accept_by_entropy: the rule itself"
        for row in range(40):
            places = ranked(row, entropy)
            n = [n for n in range(len(places)) if entropy[row, places[:n]].sum() <= budget]
            assert set(got[row].nonzero()[:, 0].tolist()) == set(places[: len(n)]), (
                f"Algorithm 2: while the sum of entropies BEFORE is <= {budget}")
    n = torch.arange(3, 43)[:, None] % 8
    got = tadm.most_certain(logits, allowed, "confidence", n=n)
    for row in range(40):
        assert set(got[row].nonzero()[:, 0].tolist()) == set(ranked(row, -likeliest)[: n[row]]), (
            "confidence: the n positions with the likeliest tokens")


@pytest.mark.parametrize("order,budget,steps,K,needed", [
    ("confidence", 0.1, 12, 4, 12), ("confidence", 0.1, None, 1, 4), ("entropy", 0.0, 400, 4, 4),
    ("entropy", 1.2, 12, 1, 2), ("entropy", math.inf, 12, 4, 1), ("entropy", 0.0, 3, 1, 3)])
def test_sampler_by_certainty_leaves_no_mask(order, budget, steps, K, needed):
    """Of four tokens each has ln 3 = 1.1 nats."""
    model = Spy(3)
    z, stats, _ = recorded(model, 50, 4, steps, K, order=order, budget=budget)
    assert (z < 3).all(), "no mask is left"
    assert stats["steps"] == needed, f"{order}, budget {budget}, T = {steps}: {needed} steps"
    assert len(model.predicted) == stats["denoiser_calls"], "one prediction a step"


def unmasked_spy(table, stale=False):
    """A uniform-state model: logits from the token, or (stale) from that of the cache."""

    def logits(canvas, cache):
        seen = cache if stale else canvas
        return table[seen[0] if isinstance(seen, tuple) else seen]

    model = Spy(len(table), logits)
    model.mask_id, model.depths = None, (2, 1)
    model.config = argparse.Namespace(vocab_size=len(table))
    model.parameters = lambda: iter([table])
    return model


def np_uniform_posterior(z, x_theta, alpha_t, alpha_s):
    """Eq. 32, by Bayes' rule for one-hot x_theta, in float64: (V,)."""
    V, a = len(x_theta), alpha_t / alpha_s
    onto_z = np.full(V, (1 - a) / V)  # q(z_t | z_s) for all z_s
    onto_z[z] += a
    from_x = alpha_s * x_theta + (1 - alpha_s) / V  # q(z_s | x)
    return onto_z * from_x / (onto_z * from_x).sum()


def test_uniform_noise():
    x, t = torch.full((3, 40_000), 2), torch.tensor([0.0, 0.3, 1.0])
    for row, share in zip(tadm.corrupt_uniform(x, t, 5, rng()), (0, 0.3, 1)):
        for token in range(5):
            expected = share / 5 + (1 - share) * (token == 2)
            mean_is(row == token, expected, f"a token is redrawn from all V with t = {share}")
    repeats(lambda g: tadm.corrupt_uniform(x, t, 5, g))


@pytest.mark.parametrize("alpha_t,alpha_s", [(0.0, 0.2), (0.3, 0.31), (0.5, 1.0), (0.2, 0.9)])
def test_uniform_posterior_is_bayes(alpha_t, alpha_s):
    soft = torch.randn(4, 4, generator=rng()).double().softmax(-1)
    x_theta = torch.cat([torch.eye(4).double(), soft])  # clean tokens and predictions
    z = torch.arange(4).repeat_interleave(8)[None]  # each token with each of these
    got = tadm.uniform_posterior(z, x_theta.repeat(4, 1)[None], alpha_t, alpha_s)[0].numpy()
    for i, j in itertools.product(range(4), range(8)):
        truth = np_uniform_posterior(i, x_theta[j].numpy(), alpha_t, alpha_s)
        error = np.abs(got[8 * i + j] - truth).max()
        assert error < 1e-12, f"Eq. 32, z = {i}, x_theta = {x_theta[j]}"


def test_uniform_nats_are_the_limit_of_discrete_ones():
    g, T = rng(), 10**5
    log_q = torch.randn(3, 2, 4, generator=g).double().log_softmax(-1)
    x, z = torch.tensor([[0, 1], [2, 3], [1, 1]]), torch.tensor([[0, 2], [2, 0], [3, 1]])
    t = torch.tensor([0.1, 0.5, 0.95], dtype=torch.float64)
    got = tadm.uniform_nats(log_q, x, z, t)
    for i, j in itertools.product(range(3), range(2)):
        alphas = float(1 - t[i]), float(1 - t[i]) + 1 / T
        q, p = (np_uniform_posterior(int(z[i, j]), v, *alphas)
                for v in (np.eye(4)[x[i, j]], log_q[i, j].exp().numpy()))
        truth = T * (q * np.log(q / p)).sum()
        close(got[i, j], truth, 1e-3 * abs(truth) + 1e-5, "Eq. 37: the limit of T KL(q || p). "
              "Look at: 1 / (V (1 - t)), the observed token below each ratio")


def test_uniform_objectives_of_a_fixed_prediction():
    """A prediction that never changes is exact where tokens are independent: -log p(x)."""
    table, x = torch.tensor([1.0, 0.5, -1.0]).repeat(3, 1), torch.randint(0, 3, (3000, 24))
    truth, model = -float(table[0].log_softmax(0)[x].mean()), unmasked_spy(table)
    for K in (1, 4):
        nats = tadm.uniform_bound(model, x, 8, K, rng()).mean()
        close(nats, truth, 0.02, f"Eq. 37, K = {K}")
    repeats(lambda g: tadm.uniform_bound(model, x[:9], 8, 2, g))
    close(tadm.uniform_loss(model, x, rng()), truth, 1e-5, "cross-entropy at all positions")
    assert model.graded[-2:] == [False, True], "the first prediction has no gradient"
    (first, _), ((z, p), _) = model.predicted[-2:]
    assert torch.equal(first, z[:1500]), "the first prediction is of the same z"
    assert torch.allclose(p[:1500], table.softmax(-1)[first]) and not p[1500:].any(), (
        "self-conditioning: the first prediction, in half of the rows")
    varied = unmasked_spy(torch.randn(3, 3, generator=rng()))
    repeats(lambda g: tadm.uniform_loss(varied, x[:9], g))


def test_uniform_anchor_is_stale_and_its_teacher_fresh():
    """The share of noise in a long canvas tells its time."""
    q, p = torch.randn(2, 50, 50, generator=rng())
    student, teacher = unmasked_spy(q, stale=True), unmasked_spy(p)
    x, T, K = torch.zeros(200, 1000).long(), 10, 4
    kl = tadm.uniform_bound(student, x, T, K, rng(2), draws=1, teacher=teacher)
    z, z_stale = student.predicted[0]
    t, t_stale = ((v != 0).float().mean(1) / 0.98 for v in (z, z_stale))
    for seen in (teacher.refreshed[0], teacher.predicted[0][0]):
        assert torch.equal(seen, z), "the teacher sees z_t, and so does its anchor"
    assert not any(student.graded + teacher.graded), "an evaluation has no gradients"
    truth = (t + ((1 - t) * T).long() % K / T).clamp(max=1)
    right = ((t_stale - truth).abs() < 0.04).float().mean()  # but near the edge of a step
    assert right > 0.7, "the anchor is k/T older than its canvas, k = 0..K-1"
    kept = (z_stale == z)[z != 0].float().mean()
    assert kept > 0.5, "Eq. 15: the anchor saw z_t with more noise"
    log_q, log_p = q[z_stale].log_softmax(-1), p[z].log_softmax(-1)
    truth = (log_p.exp() * (log_p - log_q)).sum(-1).mean(1) * 2 * t.sqrt()  # the weight dt/du
    assert (kl - truth).abs().mean() < 0.04 * truth.mean(), "KL(teacher || model), the mean"


def test_uniform_step_is_algorithm_2():
    rows = [[0.0, 0.0, 9.0, 0.0], [1.0, 0.0, 0.0, 0.0], [0.0, 0.25, 0.0, 0.0]]
    logits = torch.tensor(rows).expand(4000, 3, 4)
    for t, eta in ((1.0, 0.0), (0.25, math.inf)):
        z, p = tadm.uniform_step(logits, t, eta, rng())
        truth = (logits / (0.4 + 0.4 * t)).softmax(-1)
        assert torch.allclose(p, truth, atol=1e-6), "Algorithm 2: tau = 0.4 + 0.4 n/T"
        for place, token in itertools.product(range(3), range(4)):
            accepted = eta > 0 or place == 0  # eta = 0: one alone, that of least entropy
            share = float(truth[0, place, token]) if accepted else 1 / 4
            mean_is(z[:, place] == token, share, f"Algorithm 2, eta = {eta}, place {place}: "
                    "accepted tokens are drawn from p, others are fresh noise")
    rows = tadm.uniform_step(logits[:2], torch.tensor([[1.0], [0.25]]), 0.1, rng())[1]
    each = [tadm.uniform_step(logits[:1], t, 0.1, rng())[1][0] for t in (1.0, 0.25)]
    assert torch.allclose(rows, torch.stack(each)), "every row has its own time"
    repeats(lambda g: tadm.uniform_step(logits, 0.5, 0.1, g)[0])
    prompt = torch.tensor([True, False, False]).expand(4000, 3)  # the surest place is given
    z, p = tadm.uniform_step(4 * logits, 1.0, 0.0, rng(), prompt)
    mean_is(z[:, 1] == 0, float(p[0, 1, 0]), "a prompt does not compete for the budget")


@pytest.mark.parametrize("T,K", [(7, 3), (5, 1), (4, 9)])
def test_uniform_texts_come_from_algorithms_1_and_2(T, K):
    table, callbacks = 3 * torch.randn(6, 6, generator=rng()), []
    prompt = torch.tensor([5, 6, 6, 2, 6, 6, 6, 6])  # V where text is wanted
    hidden, model = prompt == 6, unmasked_spy(table)
    z, stats = tadm.sample_uniform(model, 30, 8, T, K, prompt, 0.5, rng(1),
                                   lambda *step: callbacks.append(step))
    n = -(-T // K)
    assert stats == {"steps": T, "anchor_calls": n, "denoiser_calls": T, "layer_calls": 2 * n + T}
    assert len(model.refreshed) == n, "Algorithm 1: refresh at 0, K, 2K, ..."
    assert not any(model.graded), "sampling records no gradients"
    seen = [canvas for canvas, _ in model.predicted]
    assert len(seen[0][0][:, hidden].unique()) == 6, "the canvas starts as noise"
    assert not seen[0][1].any(), "self-conditioning: nothing at first"
    for j, (step, after, age) in enumerate(callbacks):
        assert (step, age) == (j, j % K), "callback(step, z, age)"
        for used in (model.predicted[j][1], model.refreshed[j // K]):
            assert all(map(torch.equal, used, seen[j // K * K])), "one anchor until the next"
        assert (after[:, ~hidden] == prompt[~hidden]).all(), "the prompt is put back"
        logits = table[seen[j][0]]
        if j + 1 < T:
            assert torch.equal(seen[j + 1][0], after), "a step goes on where the last ended"
            truth = (logits / (0.4 + 0.4 * (1 - j / T))).softmax(-1)
            assert torch.allclose(seen[j + 1][1], truth, atol=1e-6), "self-conditioning: p before"
    likeliest = logits.argmax(-1).where(hidden, prompt)
    assert torch.equal(z, after) and torch.equal(z, likeliest), "n = 1: the likeliest"
    repeats(lambda g: tadm.sample_uniform(model, 3, 8, T, K, prompt, 0.0, g)[0])
    bad = ((0, 8), (1, 0), (1, 8, 0), (1, 8, 4, 0), (1, 8, 4, 1, None, -1.0),
           (1, 8, 4, 1, prompt + 1), (1, 8, 4, 1, prompt - 3))
    refuses(lambda call: tadm.sample_uniform(model, *call), *({"call": call} for call in bad))


def test_uniform_network_reads_tokens_and_its_last_prediction():
    model = random_model("UniformLM", tadm)
    z = torch.randint(0, 11, (2, 6), generator=rng())
    p = torch.randn(2, 6, 11, generator=rng()).softmax(-1)
    plain = model.predict(z, model.refresh(z))
    assert plain.shape == (2, 6, 11) and model.mask_id is None, "V tokens, none is a mask"
    fresh = tadm.UniformLM(tadm.Config(**SIZES | {"vocab_size": 500}))
    close(fresh.token.weight.std(), 0.8, 0.05, "large initial embeddings: standard deviation")
    assert torch.equal(plain, model.predict((z, 0 * p), None)), "self-conditioning: zeros are none"
    assert not torch.allclose(plain, model.predict((z, p), None)), "self-conditioning must matter"


def test_rollout_without_masks():
    row, T = torch.randn(40, generator=rng()), 10
    model = unmasked_spy(row.repeat(40, 1))
    x, age = torch.zeros(300, 400).long(), torch.arange(300) % 3
    (z, p), cache, t = tadm.rollout(model, x, age, T, rng())
    start, none = model.refreshed[0]
    assert len(model.refreshed) == 1 and not none.any(), "one anchor, and no prediction at first"
    for used in (cache, *(anchor for _, anchor in model.predicted)):
        assert torch.equal(used[0], start), "Eq. 13: one anchor for all steps"
    noise = (start != 0).float().mean(1) / (39 / 40)
    assert (noise - t - age / T).abs().max() < 0.15, "Eq. 13: x with noise of time i_a / T"
    assert torch.equal(z[age == 0], start[age == 0]) and not p[age == 0].any(), "age 0: no step"
    moved = (z != start)[age > 0].float().mean()
    close(moved, 39 / 40, 0.01, "Algorithm 2: all but one become noise")
    truth = (row / (0.4 + 0.4 * (t + 1 / T))[:, None, None]).softmax(-1).expand_as(p)
    assert torch.allclose(p[age > 0], truth[age > 0], atol=1e-5), "Algorithm 2: p of the last step"
    assert torch.equal(model.predicted[1][0][0][age == 1], z[age == 1]), "done rows stay"


def test_distill_without_masks():
    q, p = torch.randn(2, 5, 5, generator=rng())
    student, teacher = unmasked_spy(q, stale=True), unmasked_spy(p)
    x = torch.randint(0, 5, (6, 50), generator=rng())
    loss = tadm.posttrain_loss(student, teacher, x, 6, kd_weight=0.7, generator=rng(1))
    assert len(student.refreshed) == 1, "Eq. 13: one anchor, the first"
    (z, _), (z_stale, _) = student.predicted[-1]
    log_q, log_p = q.double().log_softmax(-1)[z_stale], p.double().log_softmax(-1)[z]
    kl = (log_p.exp() * (log_p - log_q)).sum(-1)
    truth = float((0.7 * kl - log_q.gather(2, x[..., None])[..., 0]).mean())
    close(loss, truth, 1e-4 * truth, "Eq. 14 in a uniform state: the plain mean")


# --------------------------------------------------------------------- the built-in stories


def ways(template):
    """[(text, probability)]: all ways of drawing a template, the outermost brackets first."""
    draw = re.search(r"\[((?:[^][]|\[[^][]*\])*)\]|\{(\w+)\}", template)
    if not draw:
        return [(template, 1.0)]
    choices = toy.SLOTS[draw[2]] if draw[2] else ["", draw[1]]
    before, after = template[: draw.start()], template[draw.end() :]
    return [(text, p / len(choices)) for choice in choices
            for text, p in ways(before + choice + after)]


def test_stories_come_as_often_as_the_tables_say():
    """All texts of the sentences differ, and end with their only full stop, so that a story falls
    into its draws in one way: their entropies add up."""
    g, n = random.Random(1), 5000
    texts = [toy.write_story(g) for _ in range(n)]
    told, nats, words = collections.Counter(), 0.0, []
    for text in texts:
        told.update(re.findall(r"[^.]+\.", toy.in_capitals(text)))
    for text, p in itertools.chain(*map(ways, toy.STORY)):
        nats -= p * math.log(p)
        if text:
            share = told.pop(text) / n
            close(share, p, 5 * math.sqrt(p / n), f"share of stories with {text!r}, once")
    assert not told, "nothing but these sentences"
    for kinds, facts in toy.FACTS.items():
        nats += math.log(math.perm(len(facts), len(kinds.split())))
        words += facts
        first = [re.search(rf"\b({'|'.join(facts)})\b", text)[0] for text in texts]
        for word in facts:
            close(first.count(word) / n, 1 / len(facts), 0.025, f"share of stories about {word}")
    close(toy.story_entropy(), nats, 1e-9, "entropy in nats per story")
    assert len(set(words)) == len(words), "a fact stands in one list"
    assert texts[0] == toy.write_story(random.Random(1)), "the same seed, the same story"


TALE = ("One day, Tom and Mia went to the park. Mia had a big red ball. The ball was nice. At the "
        "park Tom saw a little dog. The dog took the red ball. Tom found the ball under a tree. "
        "They played at the park.")


@pytest.mark.parametrize("old,new,bad", [
    ("", "", 0), (" The ball was nice.", "", 0), ("took the red", "took the", 0),
    ("took the red", "took the blue", 1), ("At the park Tom", "At the zoo Tom", 1),
    ("found the ball", "found the kite", 1), ("played at the park", "played at the zoo", 1),
    ("Mia had", "Anna had", 1), ("They played", "Mia and Tom played", 0),
    ("Tom and Mia", "Tom and Tom", 1), ("Tom and Mia", "Tom and FRIEND", 1),
    (" big", " big big", 1), (" took", "", 1), ("tree.", "tree", 1), ("tree.", "tree!", 1),
    (" Tom found the ball under a tree.", "", None), ("the park.", "the park..", 1),
    ("park. Mia had", "park. The ball was nice. Mia had", None),
])
def test_stories_each_fault_costs_its_sentence(old, new, bad):
    whole, valid, n = toy.check_story(TALE.replace(old, new, 1))
    assert n - valid == (bad or 0), "a valid sentence agrees with the facts first told"
    assert whole == (bad == 0), "None: all sentences valid, but no story"


def test_stories_shares_in_canvases():
    tokenizer = toy.Tokenizer.train([TALE], 200, 1000)
    ids = tokenizer.encode(TALE)
    rows = [ids + [0] * 9, ids + [0, 0, ids[3], 0, 0, 0, 0, 0, 0], [0] * (len(ids) + 9)]
    shares = toy.valid_shares(torch.tensor(rows), tokenizer)
    assert shares == {"stories": 1 / 3, "sentences": 14 / 15}, (
        "words after the end are not valid, nor is an empty canvas")


# -------------------------------------------------------------------------------- the optimizer


@pytest.mark.parametrize("shape", [(8, 8), (12, 4), (4, 12), (1, 1)])
def test_script_muon_against_numpy(shape):
    """Gradients are multiples of U S V^T: the steps are near U V^T, along momentum."""
    u, s, v = np.linalg.svd(np.random.default_rng(0).normal(size=shape), full_matrices=False)
    s = np.linspace(9, 9 / 5, len(s))
    p = torch.zeros(shape).requires_grad_()
    optimizer = toy.Muon([p], {"lr": 0.01})
    size, mean = 0.01 * 7 * max(1, shape[0] / shape[1]) ** 0.5, 0.0
    for factor in (1.0, -0.5, -3.0):
        mean = 0.95 * mean + 0.05 * factor
        ahead = 0.05 * factor + 0.95 * mean  # Nesterov; its sign: +, -, -
        before, p.grad = p.detach().clone(), torch.tensor(factor * (u * s) @ v).float()
        optimizer.step()
        update = (before - p.detach()).numpy() / size * np.sign(ahead)
        found = np.diag(u.T @ update @ v.T)
        assert ((0.65 < found) & (found < 1.25)).all(), f"singular values near 1, got {found}"
        assert np.allclose(update, (u * found) @ v, atol=1e-3), "the gradient's singular vectors"


def test_script_muon_trains_matrices_of_layers_and_fusion_only():
    model = untrained("TADM")
    muon, adamw = toy.make_optimizers(model)
    names = {id(p): name for name, p in model.named_parameters()}
    ours, others = ([names[id(p)] for p in o.param_groups[0]["params"]] for o in (muon, adamw))
    assert sorted(ours + others) == sorted(names.values()), "each weight once"
    assert set(ours) == {name for name in names.values() if re.fullmatch(
        r"(anchor\.\d|denoiser\.\d|fusion)\.(qkv|out|up|down|gate)\.weight", name)}
    post = ref.PostTrained(untrained("MDLM", n_anchor=3), 1, 1, 4)
    new = [p for o in toy.make_optimizers(post) for p in o.param_groups[0]["params"]]
    assert new and all(p.requires_grad for p in new), "the frozen base is left alone"


# ---------------------------------------------------------------------------- text and data

ODD = """“Well,” said Tom’s dog — woof!  It didn't; the café cost 25 cents…

They went home, and  slept."""
TINY = ("--data @/tales.txt --steps 6 --d-model 16 --n-heads 2 --n-anchor 2 --n-denoiser 1 "
        "--batch-size 4 --seq-len 12 --device cpu")
POST = "--posttrain @/mdlm.pt --steps 6"


def write_tales(folder, n=60, between=toy.END):
    """A text file of n different short stories. Returns its path."""
    g, path = random.Random(7), folder / "tales.txt"
    nouns = ["cat", "dog", "bird", "fish", "frog", "cow", "duck", "hen"]
    tales = [f'The {g.choice(nouns)} saw {i} {g.choice(nouns)}s, said "Hello!"' for i in range(n)]
    path.write_text(between.join(tales), encoding="utf-8")
    return path


def load(path, seq_len):
    args, _ = toy.parse(["--data", str(path), "--seq-len", str(seq_len)])
    return toy.load_data(args)[:3]


@pytest.mark.parametrize("vocab_size", [60, 500])
def test_text_tokenizer_gives_back_the_text(vocab_size):
    tokenizer = toy.Tokenizer.train([TALE, ODD], vocab_size, 1000)
    for tale in (TALE, ODD):
        ids = tokenizer.encode(tale)
        assert tokenizer.decode([*ids, 0, 5, 0]) == tale, "the text, up to the end token"
    assert len(set(tokenizer.vocab)) == len(tokenizer.vocab) <= vocab_size
    small = toy.Tokenizer.train(["aa bb aa cc aa"], 6, 100)
    assert small.vocab == [toy.END, " ", "a", "b", "c", " aa"], "end, characters, words"
    assert small.encode("aa aa bb") == [2, 2, 5, 1, 3, 3], "a word brings its own space"


@pytest.mark.parametrize("between", [f"\n{toy.END}\n", "\n \n\n"])
def test_text_is_divided_by_story_and_cut_from_the_beginning(tmp_path, between):
    path = write_tales(tmp_path, between=between)
    text = path.read_text(encoding="utf-8")
    path.write_text(text + between + text, encoding="utf-8")
    tales, (train, val, tokenizer) = text.split(between), load(path, 8)
    assert train.shape == (57, 8) and val.shape == (3, 8), "one story in 20 validates, none twice"
    rest = [tale for i, tale in enumerate(tales) if i % 20]
    for row, tale in zip([*val, *train], [*tales[::20], *rest]):
        assert tale.startswith(tokenizer.decode(row.tolist())), "a canvas begins where a story does"
    long, _, tokenizer = load(path, 90)
    assert tokenizer.decode(long[0].tolist()) == tales[1] and long[0, -1] == 0, "filled up with end"


def test_text_download(tmp_path, monkeypatch):
    """Checked by its hash, once, into the cache of the user; a silent server is not waited for."""
    (tmp_path / "good").write_bytes(b"once upon a time")
    (tmp_path / "bad").write_bytes(b"once upon")
    set_timeout, silent = socket.setdefaulttimeout, socket.create_server(("127.0.0.1", 0))
    monkeypatch.setattr(socket, "setdefaulttimeout", lambda seconds: set_timeout(seconds / 20))
    slow = f"http://127.0.0.1:{silent.getsockname()[1]}/"
    digest = hashlib.sha256(b"once upon a time").hexdigest()
    monkeypatch.setitem(toy.TINYSTORIES, "hash_prefix", digest)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def fetch(url):
        monkeypatch.setitem(toy.TINYSTORIES, "url", url)
        return toy.download()

    for url in ((tmp_path / "bad").as_uri(), slow, "http://127.0.0.1:9/", "http://a:b/"):
        with pytest.raises(toy.UserError, match="could not be downloaded"):
            fetch(url)
        assert not [*(tmp_path / "tadm-toy").iterdir()], "nothing half-done may stay behind"
    silent.close()
    set_timeout(None)
    path = fetch((tmp_path / "good").as_uri())
    assert path.read_bytes() == b"once upon a time" and path.parent == tmp_path / "tadm-toy"
    assert fetch("http://127.0.0.1:9/good") == path, "downloaded once"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", os.devnull)
    with pytest.raises(toy.UserError, match="Not a dir"):  # not below the working one
        fetch((tmp_path / "good").as_uri())


# ---------------------------------------------------------------------------------- scripts


def words(line, folder):
    """What a shell makes of a line, where @ is the folder."""
    return shlex.split(line.replace("TINY", TINY).replace("@", shlex.quote(str(folder))))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with tales.txt, tiny checkpoints of all kinds, and what each run printed."""
    out = tmp_path_factory.mktemp("it's")
    write_tales(out)
    for line in ("TINY", "TINY --model adlm --gamma 0.1 --dtype bfloat16", "TINY --model mdlm",
                 "TINY --model uniform", POST, POST.replace("mdlm", "uniform")):
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            assert toy.main(words(f"{line} --out @", out)) == 0
        name = re.search(r"^(\w+): .* weights to train", printed.getvalue(), re.MULTILINE)[1]
        (out / f"{name}.txt").write_text(printed.getvalue(), encoding="utf-8")
    return out


@pytest.fixture
def run(trained, tmp_path, monkeypatch, capsys):
    """run(line) does what a shell does, in a folder of its own; @ is that of trained. It returns
    the exit code, what is printed, and the lines on stderr that are no progress bars."""
    monkeypatch.chdir(tmp_path)

    def run(line):
        script, *argv = words(line, trained)
        capsys.readouterr()
        code = {"train_toy.py": toy, "sample.py": sample_script}[script].main(argv)
        printed, errors = capsys.readouterr()
        bars = r"%\||it/s|\x1b|^\s*$"
        return code, printed, [row for row in errors.splitlines() if not re.search(bars, row)]

    return run


def at_step(monkeypatch, number, act):
    """Call act(model) when a training comes to this step."""
    loss = toy.training_loss

    def patched(model, x, args, step, g):
        if step == number:
            act(model)
        return loss(model, x, args, step, g)

    monkeypatch.setattr(toy, "training_loss", patched)


def tables(printed):
    """The Markdown tables that a script printed, each a list of rows, the first one the head."""
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in printed.splitlines()]
    rows = [row for row in rows if row and not row[0].startswith("---")]
    heads = [i for i, row in enumerate(rows) if row[0] == "model"]
    return [rows[i:j] for i, j in zip(heads, [*heads[1:], None])]


def test_script_trains_and_samples_from_end_to_end(run, trained):
    printed = (trained / "tadm.txt").read_text(encoding="utf-8")
    table = [[float(cell) for cell in row[1:5]] for row in tables(printed)[0][1:]]
    assert [row[0] for row in table] == [1, 2, 4, 8], "the closing table: K = 1, 2, 4, 8"
    share = toy.fusion_share(untrained("TADM", seq_len=12, d_model=16))
    for K, _, calls, with_fusion in table:
        close(calls, 1 / 2 + 1 / K, 0.15, "layer calls per step, Eq. 11")
        close(with_fusion - calls, share / 2, 0.1, "with the fusion")
    bound = re.search(r"anchors: ([\d.]+) \+- [\d.]+ nats/token, ([\d.]+) nats/char", printed)
    x, tokenizer = load(trained / "tales.txt", 12)[1:]
    characters = sum(len(tokenizer.decode(row)) for row in x.tolist())
    close(float(bound[2]) * characters, float(bound[1]) * x.numel(), 0.2, "nats of all, either way")
    command = printed.partition("now try: python ")[2].splitlines()[0]
    for options, told in (("--steps 5 --refresh-every 2", "5 steps, 3 anchor calls, "),
                          ("--prompt 777777777777 --one-by-one", "0 steps, "),  # no hole in it
                          ("--order entropy --eta 1e9", "1 steps, 1 anchor calls"),
                          ("--prompt 'The cat ___ 3 [MASK] and said'", "anchor age   0")):
        code, printed, _ = run(f"{command} {options}")
        assert code == 0 and told in printed and "\x1b" not in printed, "text without a terminal"
    assert re.search(r"^\[1\] The cat.* 3.* and said", printed, re.MULTILINE), "the prompt stays"
    code, printed, _ = run("sample.py @/uniform.pt --prompt 'The cat ___ 3' --eta 2 --num 1")
    assert re.search(r"^\[1\] The cat.* 3", printed, re.MULTILINE), "without masks, too"
    assert code == 0 and "48 steps, 0 anchor calls" in printed
    saved, name = toy.load_checkpoint(trained / "tadm.pt"), "denoiser.0.up.weight"
    sampled = toy.build(saved, "cpu")[0].state_dict()[name]
    assert sampled.equal(saved["ema"][name]) and not sampled.equal(saved["weights"][name])


@pytest.mark.parametrize("base", ["mdlm", "uniform"])
def test_script_posttrain_from_end_to_end(run, trained, base):
    printed = (trained / f"posttrained_{base}.txt").read_text(encoding="utf-8")
    table = {(kind, int(K)): tuple(map(float, values[:3]))
             for kind, K, *values in tables(printed)[0][1:]}
    rows = itertools.product(("naive", "fused"), (1, 2, 3, 4, 8))
    assert set(table) == {*rows, ("teacher", 1)}
    assert table["naive", 1] == table["fused", 1] == table["teacher", 1], "K = 1 is the teacher"
    assert table["teacher", 1][1:] == (0, 1), "the teacher: KL 0, all layers at every step"
    assert table["naive", 8][2] < table["fused", 8][2] < 1, "layer calls"
    paths = [trained / f"{name}.pt" for name in (base, f"posttrained_{base}")]
    before, after = (toy.load_checkpoint(path)["ema"] for path in paths)
    for weight, value in before.items():
        assert value.equal(after[f"base.{weight}"]), f"{weight} of the base must stay frozen"
    n_new = sum(v.numel() for k, v in after.items() if k.startswith("fusion."))
    assert f"posttrained_{base}: {n_new:,} weights to train of " in printed
    assert run(f"sample.py @/posttrained_{base}.pt --steps 9 --naive")[0] == 0


def test_script_learns_the_built_in_stories_without_a_network(run, monkeypatch):
    monkeypatch.setattr(toy, "N_STORIES", 200)
    monkeypatch.setitem(toy.TINYSTORIES, "url", "http://127.0.0.1:9/x")
    monkeypatch.setenv("XDG_CACHE_HOME", os.getcwd())
    code, printed, (error,) = run("train_toy.py TINY --data tinystories --model mdlm --lr 0.01 "
                                  "--seq-len 62 --steps 60")
    assert code == 0 and "could not be downloaded" in error and "built-in stories" in error
    assert f"{toy.story_entropy() / 62:.4f} nats/token" in printed
    assert tables(printed)[0][0][-2:] == ["stories", "sentences"]
    nats = re.search(r"fresh anchors: ([\d.]+)", printed)[1]
    assert float(nats) < 3.6, "an untrained model has ln V = 4.7 nats/token"


@pytest.mark.parametrize("model,source", [
    ("tadm", "TINY"), ("uniform", "TINY --model uniform"),
    ("posttrained_mdlm", POST)])
def test_script_resume_equals_an_uninterrupted_run(run, trained, monkeypatch, model, source):
    """Ctrl-C after 3 of 6 steps, then --resume: the very same weights and averages."""
    stop = signal.SIGINT if model == "tadm" else signal.SIGTERM
    with monkeypatch.context() as patch:
        at_step(patch, 3, lambda _: signal.raise_signal(stop))
        code, printed, _ = run(f"train_toy.py {source} --out 'a $b'")
    assert code == 130, "Ctrl-C"
    before = "stopped at step 3, all saved; to go on: python "
    assert run(printed.partition(before)[2].splitlines()[0])[0] == 0
    paths = trained / f"{model}.pt", Path("a $b") / f"{model}.pt"
    whole, parts = map(toy.load_checkpoint, paths)
    assert parts["step"] == whole["step"] == 6
    for kind in ("weights", "ema"):
        for name, value in whole[kind].items():
            assert value.equal(parts[kind][name]), f"{kind} {name} differs after --resume"


def test_script_stops_where_nothing_is_finite(run, monkeypatch):
    code, _, (error,) = run("train_toy.py TINY --lr 1e30")
    assert code == 2 and "not finite" in error and "nothing was saved" in error
    assert not list(Path("out").iterdir()), "weights may break after the loss: none is saved"
    at_step(monkeypatch, 4, lambda model: model.position.data.fill_(math.nan))
    code, _, (error,) = run("train_toy.py TINY")
    assert code == 2 and "at step 4" in error and "tadm.pt holds step 3" in error
    assert toy.load_checkpoint("out/tadm.pt")["step"] == 3


def test_script_overwrites_no_other_run(run, monkeypatch):
    """A run that begins and ends within another one's first step has the name."""
    begun, line = [], "train_toy.py TINY --seed"

    def act(model):
        begun.append(model)
        assert len(begun) == 2 or run(f"{line} 9")[0] == 0

    at_step(monkeypatch, 1, act)
    code, _, errors = run(f"{line} 0")
    assert code == 2 and "exists" in errors[-1]
    assert toy.load_checkpoint("out/tadm.pt")["args"]["seed"] == 9


# Lines that must end with exit code 2 and one line, which contains the second string.
BAD = {
    "train_toy.py --data nowhere.txt": "cannot read",
    "train_toy.py --data empty": "too short",
    "train_toy.py --data binary": "utf-8",
    "train_toy.py --data stories --seq-len 20": "--seq-len 62",
    "train_toy.py TINY --out short": "--out",
    "train_toy.py TINY --stepz 3": "--stepz",
    "train_toy.py TINY --device abacus": "--device",
    "train_toy.py TINY --model mdlm --gamma 1": "--gamma",
    "train_toy.py TINY --n-heads 3": "divisible",
    "train_toy.py TINY --vocab-size 5": "--vocab-size",
    "train_toy.py TINY --out @": "exists",
    "train_toy.py --posttrain @/tadm.pt": "mdlm",
    "train_toy.py --posttrain @/mdlm.pt --anchors stale": "--anchors",
    "train_toy.py --posttrain @/mdlm.pt --preset gpu": "has --preset cpu",
    "train_toy.py --posttrain @/mdlm.pt --model uniform": "a run from",
    "train_toy.py --resume": "no checkpoint",
    "train_toy.py --resume @/tadm.pt --d-model 32": "has --d-model 16",
    "train_toy.py --resume @/tadm.pt --out elsewhere": "has --out",
    "train_toy.py --resume @/tadm.pt --posttrain @/mdlm.pt": "not allowed with",
    "train_toy.py --resume unfit.pt": "damaged",
    "train_toy.py --resume parts.pt": "not a checkpoint",
    "sample.py none.pt": "no checkpoint",
    "sample.py other.pt": "not a checkpoint",
    "sample.py cut.pt": "not a checkpoint",
    "sample.py damaged.pt": "damaged",
    "sample.py nan.pt": "not finite",
    "sample.py @/tadm.pt --prompt 1234567890123": "shorten",
    "sample.py @/tadm.pt --prompt 5%": "'%'",
    "sample.py @/tadm.pt --num 0": "num",
    "sample.py @/tadm.pt --one-by-one --remask cap": "steps",
    "sample.py @/tadm.pt --eta 1": "--eta needs",
    "sample.py @/tadm.pt --naive": "--naive",
    "sample.py @/tadm.pt --quick": "--quick needs",
    "sample.py --compare @/tadm.pt --num 1": "--num has no effect",
    "sample.py --compare @/tadm.pt moved.pt": "not trained on the same",
    "sample.py --compare @/uniform.pt": "no mask",
    "sample.py @/uniform.pt --order entropy": "--order has no effect",
    "sample.py @/tadm.pt --svg a.txt": "into a file named .svg",
    "sample.py @/tadm.pt --svg a.svg --steps 1001": "(here 1001)",
    "sample.py @/tadm.pt --svg folder.svg": "--svg",
}


@pytest.mark.parametrize("line", BAD)
def test_script_bad_input(run, trained, line):
    for name, content in (("empty", b""), ("binary", b"\x89PNG\xff\x00"), ("short", b"one word"),
                          ("cut.pt", (trained / "tadm.pt").read_bytes()[:9999])):
        Path(name).write_bytes(content)
    good = toy.load_checkpoint(trained / "tadm.pt")
    for name, change in (("unfit", {"optimizers": [{}, {}]}), ("damaged", {"ema": {}}),
                         ("moved", {"data_hash": "another"}), ("other", {"format": 1})):
        torch.save(good | change, f"{name}.pt")
    torch.save({"format": good["format"], "ema": good["ema"]}, "parts.pt")
    good["ema"]["head.bias"][0] = math.nan
    torch.save(good, "nan.pt")
    Path("folder.svg").mkdir()
    code, _, errors = run(line)
    assert code == 2 and len(errors) == 1 and BAD[line] in errors[0], errors
    assert not Path("out").exists(), "a run that is refused leaves no folder"


def test_script_defaults_follow_data_model_and_checkpoint(trained):
    post = {"steps": 1000, "batch_size": 16, "d_model": 16, "model": "posttrained_mdlm"}
    for line, truth in (("", {"seq_len": 96, "anchors": "stale"}),
                        ("--preset gpu", {"seq_len": 256}),
                        ("--data stories", {"seq_len": 62, "steps": 2000}),
                        ("--data stories --steps 5", {"seq_len": 62, "steps": 5}),
                        ("--model adlm", {"anchors": "fresh"}),
                        ("--model adlm --anchors stale", {"anchors": "stale"}),
                        ("--posttrain mdlm.pt", post), ("--resume tadm.pt", {"steps": 6})):
        argv = [str(trained / word) if word.endswith(".pt") else word for word in line.split()]
        args = vars(toy.parse(argv)[0])
        assert {name: args[name] for name in truth} == truth, line


def test_script_data_may_move_but_not_change(run, trained, monkeypatch):
    """Whoever reads data for a checkpoint compares its contents, wherever it lies now."""
    monkeypatch.setattr(toy, "report", lambda *_: None)
    text = (trained / "tales.txt").read_text(encoding="utf-8")
    changed = toy.END.join(reversed(text.split(toy.END)))
    for line in ("sample.py --compare @/mdlm.pt --quick", "train_toy.py --resume @/mdlm.pt",
                 f"train_toy.py {POST} --out new"):
        Path("moved.txt").write_text(changed, encoding="utf-8")
        code, _, errors = run(f"{line} --data moved.txt")
        assert code == 2 and "not what" in errors[0], line
        Path("moved.txt").write_text(text, encoding="utf-8")
        assert run(f"{line} --data moved.txt")[0] == 0, line


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a full disk")
def test_script_without_outputs(trained, tmp_path, monkeypatch, capfd):
    """Closed streams, as by >&-, are no fault; a full disk is told in one line. A step is saved
    before it is printed."""
    argv = [str(sample_script.SHIPPED), "--steps", "3", "--watch"]
    with open("/dev/full", "w", encoding="utf-8") as full, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", full)
        assert sample_script.main(argv) == 1
        patch.setattr(sys, "stdout", None)
        patch.setattr(sys, "stderr", None)
        assert sample_script.main(argv) == 0
    assert "sample.py: cannot print (No space left" in capfd.readouterr().err

    def broken(_):
        raise BrokenPipeError

    monkeypatch.setattr(toy.tqdm, "write", broken)
    with pytest.raises(BrokenPipeError):
        toy.run(words(f"TINY --out {tmp_path}", trained))
    assert toy.load_checkpoint(tmp_path / "tadm.pt")["step"] == 1


def test_script_compare_agrees_with_direct_calls(run, trained):
    code, printed, _ = run("sample.py --compare @/tadm.pt @/posttrained_mdlm.pt @/mdlm.pt --quick "
                           "--judge @/tadm.pt")
    assert code == 0
    quality, by_k, by_t, orders, samplers = tables(printed)
    tadm, post, mdlm = (str(trained / f"{n}.pt") for n in ("tadm", "posttrained_mdlm", "mdlm"))
    model, _ = toy.build(toy.load_checkpoint(tadm), "cpu")
    x = load(trained / "tales.txt", 12)[1]

    def row_of(table, *begin):
        (row,) = (row for row in table if row[: len(begin)] == list(begin))
        return dict(zip(table[0], row))

    def noise(i):
        return toy.step_generator(0, i, "cpu")

    for spacing in ("even", "log"):
        row = row_of(quality, tadm, "4", spacing)
        nats = ref.bound(model, x, 24, 4, noise(0), spacing=spacing).mean()
        close(row["bound"], float(nats), 0.01, f"bound under K = 4, T = 24, {spacing}")
        z, stats = ref.sample(model, 16, 12, 24, 4, generator=noise(2), spacing=spacing)
        close(row["layers"], stats["layer_calls"] / 24 / 3, 0.01, "relative to 3 layers")
        nats = ref.bound(model, z, None, generator=noise(3)).mean()
        close(float(row["perplexity"]) / math.exp(nats), 1, 0.02, "exp of the judge's bound")
    assert not {"stories", "gap"} & {*quality[0]}, "no grammar, no truth to compare with"
    bounds = [row_of(quality, name, "1")["bound"] for name in (post, f"{post}, naive")]
    assert bounds[0] == bounds[1], "K = 1 is the teacher"
    assert [row[0] for row in quality].count(mdlm) == 1, "MDLM has no K"
    cost = ref.bound(model, x, 12, 8, noise(0)) - ref.bound(model, x, 12, 1, noise(0))
    added, _, error = row_of(by_k, tadm, "even")["K = 8"].split()
    close(added, float(cost.mean()), 1e-3, "paired: what K = 8 adds at T = L")
    close(error, float(cost.std()) / len(x) ** 0.5, 1e-3, "its standard error")
    assert by_t[0][3:] == [f"T = {T}" for T in (1, 3, 12, 24, 48)]
    assert len(samplers) == 1 + 3 * 6 + 2
    options = {"order": "entropy", "budget": 0.1, "generator": noise(2)}
    steps = ref.sample(model, 16, 12, 24, 8, **options)[1]["steps"]
    row = row_of(orders, tadm, "8", "entropy, eta = 0.1")
    assert row["predictions"] == str(steps), "steps taken"


def test_script_ships_weights_as_good_as_the_readme_says(run):
    code, printed, _ = run("sample.py --num 1")  # no out/tadm.pt here
    assert code == 0 and "assets" in printed
    assert sample_script.SHIPPED.stat().st_size < 1e6
    checkpoint = toy.load_checkpoint(sample_script.SHIPPED)
    model, _ = toy.build(checkpoint, "cpu")
    readme = (Path(__file__).parent / "README.md").read_text(encoding="utf-8")
    nats, error = re.search(r"bound on 512 .*?: ([\d.]+) \+- ([\d.]+) nats/token", readme).groups()
    x = toy.load_data(argparse.Namespace(**checkpoint["args"]), checkpoint)[1][:128]
    got = ref.bound(model, x, None, generator=rng(), draws=8).mean()
    close(got, float(nats), 4 * float(error), "the README's bound, on a quarter of its canvases")


def test_script_entropy_of_samples_and_work_of_a_correction():
    z = torch.tensor([[0, 0, 1, 1], [2, 2, 2, 2]])
    close(sample_script.unigram_entropy(z), math.log(2) / 2, 1e-6, "mean over canvases")
    d, L, r = 8, 6, 4  # one layer: q, k, v, out 4 d^2; MLP 8 d^2; attention 2 L d per token
    layer = 12 * d * d + 2 * L * d
    gated = (2 * d) * d + (2 * d) * (4 * d) + (4 * d) * d
    mix = 2 * r * 3 * r + r * r + 4 * r * r + 2 * L * r  # once for each of the two canvases
    paired = 3 * d * r + 2 * mix + (4 * r * r + r) + r * d
    base = untrained("MDLM", n_anchor=3)
    for model, work in ((untrained("TADM", n_anchor=3), gated), (base, 0),
                        (ref.PostTrained(base, 1, 1, r), paired),
                        (ref.PostTrained(base, 1, 1, r, naive=True), 0)):
        close(toy.fusion_share(model), work / layer, 1e-9, "multiply-adds of the fusion")


VOCAB = [toy.END, "One", " day", " <script>alert('1')</script>", ' &"]]>', "\x0b\ufffe", "\n"]


@pytest.mark.parametrize("kind,marks,canvases,colors", [
    ("TADM", 1, ("1772", "1272", "1272"), ("1;92 2 31 0", "1;92 1;92 31 0", "0 0 2 0")),
    ("MDLM", 0, ("1772", "1272", "1272"), ("1;92 2 31 0", "0 1;92 2 0", "0 0 2 0")),
    ("UniformLM", 2, ("1234", "1254", "1354"), ("2 2 2 2", "0 0 2 0", "0 2 0 0"))])
def test_script_watch(capsys, kind, marks, canvases, colors):
    """Blocks for masks, green words that the anchor has not seen, red ones masked again. Without
    masks words that a step has changed are dim, as they may be noise."""
    model = random_model(kind, vocab_size=7, n_anchor=3)
    model = ref.PostTrained(model, 1, 1, 4) if kind == "UniformLM" else model
    watch = sample_script.Watch(model, toy.Tokenizer(VOCAB), [7, 7, 2, 2], 9, True)
    watch.terminal, watch.pause = True, 0
    text = dict(enumerate(VOCAB)) | {5: "··", 7: " ███"}
    for step, (digits, colors_now) in enumerate(zip(canvases, colors)):
        canvas = list(map(int, digits))
        watch(step, torch.tensor([canvas]), step % 2)
        head, body = capsys.readouterr().out.split("\n")[:2]
        age = f"  anchor age   {step % 2}" if kind != "MDLM" else ""
        assert f"step    {step + 1}/9{age}" in head
        shown = re.findall(r"\x1b\[0;([\d;]+)m([^\x1b]*)", body)
        assert shown == list(zip(colors_now.split(), map(text.get, canvas)))
    assert len(watch.refreshed) == marks, "anchors that were computed"


@pytest.mark.parametrize("kind,remask", [("TADM", "rescale"), ("MDLM", "none")])
def test_script_svg(kind, remask):
    """Well-formed, without markup from the text; what is shown at any time is that frame."""
    model = random_model(kind, vocab_size=7)
    watch = sample_script.Watch(model, toy.Tokenizer(VOCAB), [7] * 6, 30, False)
    ref.sample(model, 2, 6, 30, 4, remask=remask, eta=0.9, generator=rng(3), callback=watch)
    picture = sample_script.svg(watch, 'K < 4 & "more"')
    root, name = xml.etree.ElementTree.fromstring(picture), "{http://www.w3.org/2000/svg}"
    assert root.find(f"{name}text").text == 'K < 4 & "more"', "the caption is escaped"
    masked = np.array([[kind in ("mask", "again") for kind, _ in looks] for looks in watch.frames])
    shows = (masked[:-1] & ~masked[1:]).any(1)  # the steps that reveal something
    due = [j for j in range(0, 30, 4) if any(shows[j : j + 4])] if kind != "MDLM" else []
    marks = re.findall(r"M([\d.]+)", root.find(f"{name}path[@class='due']").get("d"))
    assert np.allclose(np.array(marks, float), [15 + 450 * j / 30 for j in due], atol=0.06), (
        "an anchor is due at steps 0, 4, .., and computed if a word comes before the next; "
        "MDLM has none")
    elements = [e for e in root if e.get("class") in ("mask", "again", "new", "seen")]

    def shown(time):  # kind and word of what is visible then; None: without animation
        for e in elements:
            change, opacity = e.find(f"{name}animate"), e.get("opacity", "1")
            if change is not None and time is not None:
                times = [float(t) for t in change.get("keyTimes").split(";")]
                opacity = change.get("values").split(";")[sum(t <= time for t in times) - 1]
            if opacity == "1":
                yield e.get("class"), e.text or "███"

    times = [*((np.arange(30) + 0.5) / 30 * 14 / 18), 0.99, None]  # and a pause
    for time, looks in zip(times, [*watch.frames, watch.frames[-1]]):
        assert list(shown(time)) == [(kind, word.strip(" ")) for kind, word in looks]


def test_script_writes_a_picture(run):
    code, printed, _ = run("sample.py @/tadm.pt --svg new/a.svg --steps 1000 --prompt 'The cat'")
    calls = re.search(r"1000 steps, (\d+) anchor calls", printed)[1]
    picture = Path("new/a.svg").read_text(encoding="utf-8")
    assert code == 0 and f"1000 reverse steps, {calls} anchor calls" in picture


# ---------------------------------------------------------------- homework and test vectors

EQUATION = r"Eq\. [\d\-, ]*\d|Theorem [\d.]*\d|Algorithm \d|[Aa]ppendix C.2|Section \d"


def blank(source, names):
    """The source with a NotImplementedError that names the equation in place of the bodies of
    these functions, or of all methods of these classes. Raises UserError."""
    found, lines = {}, source.split("\n")
    for node in ast.parse(source).body:
        for f in node.body if isinstance(node, ast.ClassDef) else [node]:
            if isinstance(f, ast.FunctionDef):
                name = f.name if f is node else f"{node.name}.{f.name}"
                found[name] = f, f"{ast.get_docstring(f)} {ast.get_docstring(node)}"
    for name in names:
        if not any(f"{n}.".startswith(f"{name}.") for n in found):
            near = difflib.get_close_matches(name, found, 3, 0.5) or NAMES
            raise toy.UserError(f"tadm.py has no {name}; it has {', '.join(near)}")
    for name, (f, doc) in reversed(found.items()):  # backwards: line numbers hold
        if name in names or name.partition(".")[0] in names:
            start = f.body[1 if ast.get_docstring(f) else 0]
            first = start.lineno
            while not lines[first - 2].strip() or lines[first - 2].lstrip().startswith("#"):
                first -= 1  # a comment above the body tells what is in it
            message = ": ".join([*re.findall(EQUATION, doc)[:1], name])
            stub = f'{" " * start.col_offset}raise NotImplementedError("{message}")'
            lines[first - 1 : f.end_lineno] = [stub]
    return "\n".join(lines)


def vectors():
    """{name: float64 or int64 array}, from numpy alone; see ABOUT."""
    V, L = SIZES["vocab_size"], SIZES["seq_len"]
    x = np.arange(2 * L).reshape(2, L) * 5 % V
    z_t, z_stale = x.copy(), x.copy()
    z_t[0, 1::2] = z_t[1, 2:] = z_stale[0, 1:] = z_stale[1] = V
    t, t_stale, gamma = np.array([0.5, 0.7]), np.array([0.8, 1.0]), np.array(0.1)
    out = {"x": x, "z_t": z_t, "z_stale": z_stale, "t": t, "t_stale": t_stale, "gamma": gamma}

    def add(group, arrays):
        out.update({f"{group}.{name}": np.array(value) for name, value in arrays.items()})

    add("config", SIZES)
    for kind in KINDS:
        w = weights(random_model(kind))
        add(f"{kind}.w", w)
        rows = [np_model(w, kind, *canvases, **SIZES) for canvases in zip(z_t, z_stale)]
        parts = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
        terms = np_ce(parts["logits"], x, z_t == V, t)
        parts |= {"ce": terms * t[:, None], "loss": terms.mean()}
        if kind != "MDLM":
            terms = np_ce(parts["anchor_logits"], x, z_stale == V, t_stale)
            parts["loss_gamma"] = parts["loss"] + gamma * terms.mean()
        add(kind, parts)
    w, states = weights(shaken(ref.PairedFusion(8, 4, 2))), np.random.default_rng(0)
    add("paired.w", w)
    add("paired", np_paired_fusion(w, *states.normal(size=(3, L, 8)), n_heads=2))
    return out | {"about": np.array(ABOUT.strip().split("\n"))}


ABOUT = """
All in float64 or int64. Canvases are (B, L) = (2, 6), ids 0..10, the mask is 11.
x, z_t, z_stale, t, t_stale, gamma, config.*: what goes in. KIND: TADM, ADLM or MDLM.
KIND.w.NAME, paired.w.NAME: weights, random ones; (out, in) for linear layers.
TADM.c, h, gate, delta, h_fused: Eq. 8, 57-59. KIND.logits (B, L, V). KIND.anchor_logits: the
    anchor's own (TADM: of LN(h) without gain and bias). ADLM.projected: what its denoiser reads.
KIND.layer.NAME: after each layer. Pre-norm, LN eps 1e-5, erf GELU; qkv holds q, k, v in this
    order, each all heads; LN on q and k per head; rotary positions turn channels (i, i + half) of
    a head by position times 10000^(-i / half); both branches are scaled by 1/sqrt(3), for 3 layers.
KIND.ce (B, L): cross-entropy at the positions masked in z_t, else 0, in nats.
KIND.loss: Theorem 5.1, the mean of ce / t. KIND.loss_gamma: and the anchor's supervision.
paired.c, c_cached, h_cached, m, gate, h_fused: Eq. 48-54 for one canvas, rank 4, 2 heads.
"""


@torch.no_grad()
def test_vectors_are_what_our_code_computes(tmp_path, monkeypatch):
    path = tmp_path / "new" / "vectors.npz"
    with pytest.raises(toy.UserError, match="npz"):
        main(["--vectors", "tadm.py"])
    assert main(["--vectors", str(path)]) == 0 and len(list(path.parent.iterdir())) == 1
    v = {name: torch.from_numpy(a) for name, a in np.load(path).items() if name != "about"}

    def load(network, name):
        prefix = f"{name}.w."
        w = {k.removeprefix(prefix): a.float() for k, a in v.items() if k.startswith(prefix)}
        network.load_state_dict(w)  # refuses other names and shapes
        return network

    def agree(got, name):
        error = float((got - v[name]).abs().max())
        assert got.shape == v[name].shape and error < 2e-5, f"{name} is off by {error:.2g}"

    monkeypatch.setattr(ref, "corrupt", lambda *_: v["z_t"])
    monkeypatch.setattr(ref, "corrupt_further", lambda *_: v["z_stale"])
    batch = v["x"], v["t"].float(), v["t_stale"].float()
    for kind in KINDS:
        model = load(untrained(kind), kind)
        agree(model.predict(v["z_t"], model.refresh(v["z_stale"])), f"{kind}.logits")
        agree(ref.t_anelbo(model, *batch), f"{kind}.loss")
        if kind != "MDLM":
            agree(ref.t_anelbo(model, *batch, v["gamma"]), f"{kind}.loss_gamma")
        agree((v[f"{kind}.ce"] / v["t"][:, None]).mean(), f"{kind}.loss")
    fusion = load(ref.PairedFusion(8, 4, 2), "paired")
    states = (v[f"paired.{name}"].float()[None] for name in ("c", "c_cached", "h_cached"))
    agree(fusion(*states)[0], "paired.h_fused")


def test_homework_keeps_all_but_the_bodies(capsys):
    main(["--blank", "GatedFusion", "PairedFusion.forward", "corrupt_further", "t_anelbo"])
    printed, ours = capsys.readouterr().out, inspect.getsource(ref)
    assert re.findall(r'raise NotImplementedError\("(.*)"\)', printed) == [
        "Eq. 57-59: GatedFusion.__init__", "Eq. 57-59: GatedFusion.forward",
        "Eq. 15: corrupt_further", "Theorem 5.1: t_anelbo", "Eq. 48-56: PairedFusion.forward"]
    for line in ("g = torch.sigmoid(self.gate(u))", "# 1. Noise, and more noise"):
        assert line in ours and line not in printed, "bodies, and what comments tell of them"

    def outline(source):
        defined = [n for n in ast.walk(ast.parse(source))
                   if isinstance(n, (ast.ClassDef, ast.FunctionDef))]
        return [(ast.unparse(n).partition(":\n")[0], ast.get_docstring(n)) for n in defined]

    assert outline(printed) == outline(ours), "names, arguments and docstrings stay"
    with pytest.raises(toy.UserError, match="has no layer_call; it has layer_calls"):
        main(["--blank", "layer_call"])


def test_homework_is_graded_one_thing_at_a_time(tmp_path):
    """A module with open, wrong and missing functions, and type hints."""
    source = blank(inspect.getsource(ref), ["corrupt_further"])
    for old, new in (("def corrupt_further(z_t, ", "def corrupt_further(z_t: torch.Tensor, "),
                     ("sigma_max = min(1.0, ", "sigma_max = max(1.0, "),
                     ("    return torch.where(u < t[:, None], mask_id, x)",
                      "    x[u < t[:, None]] = mask_id\n    return x")):
        assert source.count(old) == 1
        source = source.replace(old, new)
    source += "\ndel sample_times\nlayer_calls = 5\nbound = min\n"  # min has no signature
    (tmp_path / "half_done.py").write_text(source, encoding="utf-8")
    chosen = "forward or further or times or loss or schedule or draw or defaults"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=line",
               "--assert=plain", __file__, "-k", chosen]
    env = os.environ | {"TADM_MODULE": "half_done", "PYTHONPATH": str(Path(__file__).parent)}
    result = subprocess.run(command, check=False, capture_output=True, encoding="utf-8",
                            cwd=tmp_path, env=env)
    failed = set(re.findall(r"^FAILED .*::test_([a-z]+)", result.stdout, re.MULTILINE))
    wanted = {"forward", "further", "schedule", "times", "sampler"}
    assert failed == wanted, result.stdout
    for message in ("corrupt has written into its argument x", "Eq. 15: corrupt_further",
                    "half_done has no sample_times(batch_size, ",
                    "half_done has no layer_calls(config, "):
        assert message in result.stdout


@pytest.mark.skipif(not hasattr(signal, "SIGPROF"), reason="needs SIGPROF")
def test_homework_that_loops_is_stopped():
    def forever(*_):
        while True:
            pass

    what = "test_x was stopped after 0.05 s in (sample|forever), line"
    with pytest.raises(pytest.fail.Exception, match=what), limited("test_x", 0.05):
        ref.sample(Spy(2), 1, 2, 2, callback=forever)


def test_homework_table_of_the_readme():
    """Each row's -k selects the tests of the functions that it names."""
    text = (Path(__file__).parent / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r'^\| *\d+ \| (.*?) \| .*? \| `"?([a-z ]+)"?` \|', text, re.MULTILINE)
    tests = [name for name in globals() if name.startswith("test_")]
    seen, named = [], []
    for what, expression in rows:
        names, groups = re.findall(r"`([\w.]+)`", what), expression.split(" or ")
        graded = {name for group in groups for name in GROUPS[group]} - {"Config", "MDLM"}
        assert {name.split(".")[0] for name in names} == graded, f"README, -k {expression}"
        chosen = {test.split("_")[1] for test in tests if any(group in test for group in groups)}
        assert chosen & GROUPS.keys() == set(groups), f"-k {expression} also selects {chosen}"
        seen, named = seen + groups, named + names
    assert sorted(seen) == sorted(GROUPS)
    blank(inspect.getsource(ref), named)  # refuses names that do not exist


def main(argv=None):
    parser = argparse.ArgumentParser(description="Homework and test vectors.")
    parser.error = toy.fail
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--blank", nargs="+", metavar="NAME",
                      help="print tadm.py without these bodies")
    what.add_argument("--vectors", metavar="FILE.npz", help="write inputs and all results")
    args = parser.parse_args(argv)
    if args.blank:
        print(blank(inspect.getsource(ref), args.blank), end="")
        return 0
    if not args.vectors.endswith(".npz"):
        raise toy.UserError(f"--vectors {args.vectors} must end in .npz")

    def write(part):
        with open(part, "wb") as file:
            np.savez(file, **vectors())

    toy.write_file(args.vectors, "--vectors", write)
    print(f"wrote {args.vectors}; its array \"about\" says what is inside")
    return 0


if __name__ == "__main__":
    sys.exit(toy.shielded(main, "test_tadm.py"))
