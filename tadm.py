"""Time-Anchored Diffusion Language Models (TADM, arXiv 2609.37924) in one file.

A masked diffusion language model starts from a canvas of mask tokens and reveals them in T reverse
steps. The usual model runs its whole network at every step. TADM splits it:

    c = S(z_t)                  token embedding, the shared part: cheap, every step
    h = A(S(z_t'))              anchor network: expensive, every K-th step, then reused (stale)
    h_fused = Phi(c, h)         gated fusion: corrects the stale h with the current c, every step
    logits = D(h_fused)         denoiser, a few layers: every step

It is trained on anchors that are stale on purpose, so reusing them at sampling time costs little.
So every model in this file is a pair of methods, and nothing else is asked of a model:

    cache = model.refresh(z)            # expensive: once every K steps
    logits = model.predict(z, cache)    # cheap: every step; (B, L, V), real tokens only

Notation            paper         here
    clean tokens        x             x          (B, L) int64, values 0..V-1
    noisy tokens        z_t, z_t'     z_t, z_stale; the mask token is mask_id = V
    still visible       alpha_t       1 - t      (log-linear schedule: t is the masked share)
    diffusion time      t, s          t, s       (B,) float32 in [0, 1]; s = t - 1/T
    anchor's time       t' >= t       t_stale
    refresh interval    K             refresh_every
    cache age           k             0..K-1 steps
    reverse steps       T             steps
    remasking           sigma_t       sigma
    anchor supervision  gamma         gamma

Losses and bounds are in nats per token. Scaled down from the paper: 6 anchor and 2 denoiser layers
(12 and 6 there), and tens of words where the paper has a thousand tokens. Left out: time
conditioning (off in the paper too), dropout, distributed training.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

# ------------------------------------------------------------------------------ 1. the networks


@dataclass(frozen=True)
class Config:
    """Sizes of a model. Raises ValueError for sizes that cannot be built."""

    vocab_size: int  # V real tokens; the mask token is one more, mask_id = V
    seq_len: int  # L, the longest canvas
    d_model: int = 64  # d
    n_heads: int = 2
    n_anchor: int = 6  # layers of A
    n_denoiser: int = 2  # layers of D; MDLM has n_anchor + n_denoiser layers in one stack

    def __post_init__(self):
        for name in ("vocab_size", "seq_len", "d_model", "n_heads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if min(self.n_anchor, self.n_denoiser) < 0 or self.n_anchor + self.n_denoiser < 1:
            raise ValueError("n_anchor and n_denoiser must not be negative, nor both zero")
        if self.d_model % (2 * self.n_heads):
            raise ValueError(
                f"d_model ({self.d_model}) must be divisible by 2 * n_heads ({2 * self.n_heads})"
            )


class Block(nn.Module):
    """One pre-norm Transformer layer, attention in both directions: (B, L, d) -> (B, L, d)."""

    def __init__(self, config):
        super().__init__()
        d, self.n_heads = config.d_model, config.n_heads
        self.scale = (config.n_anchor + config.n_denoiser) ** -0.5  # the sum of all layers stays O(1)
        self.norm_attn = nn.LayerNorm(d)
        self.qkv = nn.Linear(d, 3 * d, bias=False)
        self.norm_q = nn.LayerNorm(d // config.n_heads, bias=False)
        self.norm_k = nn.LayerNorm(d // config.n_heads, bias=False)
        self.out = nn.Linear(d, d, bias=False)
        self.norm_mlp = nn.LayerNorm(d)
        self.up = nn.Linear(d, 4 * d)
        self.down = nn.Linear(4 * d, d)
        half = d // config.n_heads // 2
        angle = torch.outer(torch.arange(config.seq_len), 10000.0 ** (-torch.arange(half) / half))
        self.register_buffer("rotary", torch.stack([angle.cos(), angle.sin()]), persistent=False)

    def rotate(self, v):
        """Rotary positions: turn each pair of channels of v (B, heads, L, d/heads) by its angle."""
        cos, sin = self.rotary[:, : v.shape[-2]].to(v.dtype)
        a, b = v.chunk(2, dim=-1)
        return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)

    def forward(self, x):
        B, L, d = x.shape
        qkv = self.qkv(self.norm_attn(x)).view(B, L, 3, self.n_heads, d // self.n_heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each (B, heads, L, d/heads)
        q, k = self.rotate(self.norm_q(q)), self.rotate(self.norm_k(k))
        y = F.scaled_dot_product_attention(q, k, v)
        x = x + self.scale * self.out(y.transpose(1, 2).reshape(B, L, d))
        return x + self.scale * self.down(F.gelu(self.up(self.norm_mlp(x))))


class GatedFusion(nn.Module):
    """Correct a stale anchor h with the current shallow state c, token by token (Eq. 57-59).

    c, h: (B, L, d), the embedding of z_t and the cached anchor of z_t'. Returns h_fused (B, L, d).
    The last layer starts at zero, so an untrained fusion returns LN(h) and ignores c.
    """

    def __init__(self, d_model):
        super().__init__()
        self.norm_c, self.norm_h, self.norm_out = (nn.LayerNorm(d_model) for _ in range(3))
        self.gate = nn.Linear(2 * d_model, d_model)
        self.up = nn.Linear(2 * d_model, 4 * d_model)
        self.down = nn.Linear(4 * d_model, d_model)
        nn.init.zeros_(self.down.weight)
        nn.init.zeros_(self.down.bias)

    def forward(self, c, h):
        u = torch.cat([self.norm_c(c), self.norm_h(h)], dim=-1)  # (B, L, 2d)
        g = torch.sigmoid(self.gate(u))  # Eq. 57: one gate per token and channel
        delta = self.down(F.gelu(self.up(u)))  # Eq. 58
        return self.norm_out(h + g * delta)  # Eq. 59


class DiffusionLM(nn.Module):
    """What TADM, ADLM and MDLM below share: the embedding S, the head and `predict`.

    The embedding has V + 1 rows and the head V outputs: the mask token can be read, never written.
    Each model sets `depths`: the layers that its refresh and its predict run, for the statistics.
    """

    def __init__(self, config):
        super().__init__()
        self.config, self.mask_id = config, config.vocab_size
        self.token = nn.Embedding(config.vocab_size + 1, config.d_model)
        self.position = nn.Parameter(torch.empty(config.seq_len, config.d_model))
        self.norm = nn.LayerNorm(config.d_model)
        self.head = nn.Linear(config.d_model, config.vocab_size)
        # Large embeddings stay legible in the sum that the layers add to, and a large gain lets
        # small changes of that sum reach the logits: with both, facts are copied far sooner.
        nn.init.normal_(self.token.weight, std=0.8)
        nn.init.normal_(self.position, std=0.8)
        nn.init.constant_(self.norm.weight, 8.0)

    def stack(self, n_layers):
        return nn.Sequential(*[Block(self.config) for _ in range(n_layers)])

    def embed(self, z):
        """S: (B, L) int64 -> (B, L, d). Rotary positions are relative: on a canvas of masks only they
        cannot tell the first place from the last, so learned ones are added here.

        Raises ValueError for a canvas longer than seq_len.
        """
        if z.shape[1] > self.config.seq_len:
            raise ValueError(f"canvas of {z.shape[1]} tokens, the model's seq_len is "
                             f"{self.config.seq_len}")
        return self.token(z) + self.position[: z.shape[1]]

    def hidden(self, z, cache):
        """The state (B, L, d) that the head reads."""
        raise NotImplementedError

    def predict(self, z, cache):
        """Logits (B, L, V) for x given z (B, L) and a cache; only those at masked z are used."""
        return self.head(self.hidden(z, cache))


class TADM(DiffusionLM):
    """Shared embedding, cached anchor network, gated fusion, small denoiser (Eq. 8-10)."""

    def __init__(self, config):
        super().__init__(config)
        self.depths = (config.n_anchor, config.n_denoiser)
        self.anchor = self.stack(config.n_anchor)
        self.fusion = GatedFusion(config.d_model)
        self.denoiser = self.stack(config.n_denoiser)
        self.anchor_head = nn.Linear(config.d_model, config.vocab_size)  # only for gamma > 0

    def refresh(self, z):
        """h = A(S(z)): (B, L) -> (B, L, d)."""
        return self.anchor(self.embed(z))

    def hidden(self, z, cache):
        return self.norm(self.denoiser(self.fusion(self.embed(z), cache)))

    def anchor_logits(self, cache, where):
        """Logits (N, V) of the training-only head on h at the N True positions of where (B, L)."""
        return self.anchor_head(F.layer_norm(cache[where], cache.shape[-1:]))


class ADLM(DiffusionLM):
    """The predecessor (arXiv 2505.18456): the denoiser reads only the anchor's logits, never z.

    The logits' projection to d channels is cached with them: same numbers, less work per step.
    """

    def __init__(self, config):
        super().__init__(config)
        self.depths = (config.n_anchor, config.n_denoiser)
        self.anchor = self.stack(config.n_anchor)
        self.anchor_norm = nn.LayerNorm(config.d_model)
        self.anchor_head = nn.Linear(config.d_model, config.vocab_size)
        self.project = nn.Linear(config.vocab_size, config.d_model)
        self.denoiser = self.stack(config.n_denoiser)

    def refresh(self, z):
        y = self.anchor_head(self.anchor_norm(self.anchor(self.embed(z))))  # (B, L, V)
        return y, self.project(y)

    def hidden(self, z, cache):
        return self.norm(self.denoiser(cache[1]))

    def anchor_logits(self, cache, where):
        return cache[0][where]


class MDLM(DiffusionLM):
    """The single-stage baseline: one stack of n_anchor + n_denoiser layers, nothing to cache."""

    def __init__(self, config):
        super().__init__(config)
        self.depths = (0, config.n_anchor + config.n_denoiser)
        self.blocks = self.stack(config.n_anchor + config.n_denoiser)

    def refresh(self, z):
        return None

    def hidden(self, z, cache):
        return self.norm(self.blocks(self.embed(z)))


def logits_at(model, z, cache, where):
    """model.predict(z, cache)[where], (N, V), with the head run at the True positions only."""
    if isinstance(model, DiffusionLM):
        return model.head(model.hidden(z, cache)[where])
    return model.predict(z, cache)[where]


# ------------------------------------------------------------------------ 2. the forward process


def corrupt(x, t, mask_id, generator=None):
    """Draw z_t from q(z_t | x) (Eq. 1): every token becomes the mask with probability t.

    x: (B, L) int64; t: (B,) float32 in [0, 1], any probability of a mask. Returns (B, L) int64.
    """
    u = torch.rand(x.shape, device=x.device, generator=generator)  # in [0, 1): t = 1 masks all
    return torch.where(u < t[:, None], mask_id, x)


def corrupt_further(z_t, t, t_stale, mask_id, generator=None):
    """Draw z_t' from z_t, t' >= t (Eq. 15): a visible token stays with alpha_t' / alpha_t.

    So z_t' never shows what z_t hides: both lie on one trajectory. t, t_stale: (B,) float32.
    Returns (B, L) int64; equals z_t where t' = t. Raises ValueError if some t' < t.
    """
    if (t_stale < t).any():
        raise ValueError("t_stale must not be smaller than t: an anchor is older than its canvas")
    p_mask = (t_stale - t) / (1 - t).clamp_min(1e-9)  # 1 - alpha_t' / alpha_t, or 0 at t = 1
    return corrupt(z_t, p_mask, mask_id, generator)


def sample_times(batch_size, refresh_choices, steps_choices, generator=None, device=None):
    """Draw the times of a training batch (appendix C.2). Returns t, t_stale: (B,) float32.

    t ~ U(1e-3, 1), "antithetic": one row in each of B equal strata, in random order. K and T are
    drawn per row from the two lists, the age k from 0..K-1, and t' = min(1, t + k/T).
    """

    def uniform():
        return torch.rand(batch_size, device=device, generator=generator)

    def pick(choices):
        choices = torch.tensor(choices, device=device)
        return choices[(uniform() * len(choices)).long()]

    strata = uniform().argsort()
    t = 1e-3 + (1 - 1e-3) * (strata + uniform()) / batch_size
    refresh_every, steps = pick(refresh_choices), pick(steps_choices)
    age = (uniform() * refresh_every).long()
    return t, (t + age / steps).clamp(max=1)


# ------------------------------------------------------------------------- 3. loss and bound


def _weighted_ce(logits, x, masked, t):
    """(1/L) sum over masked l of CE_l / t: (B,) nats per token. logits: (N, V) at masked (B, L)."""
    ce = F.cross_entropy(logits.float(), x[masked], reduction="none")  # float32 under autocast too
    row = masked.nonzero()[:, 0]
    return torch.zeros_like(t).index_add(0, row, ce / t[row]) / x.shape[1]


def t_anelbo(model, x, t, t_stale, gamma=0.0, generator=None):
    """Training loss: the T-ANELBO (Theorem 5.1) for T -> infinity, a scalar in nats per token.

    x: (B, L) int64 clean tokens; t, t_stale: (B,) float32 from sample_times. gamma > 0 adds the
    supervision of the anchor. Raises ValueError if the model has no anchor to supervise.
    """
    # 1. Noise, and more noise for the anchor: what it saw is older than what the denoiser sees.
    z_t = corrupt(x, t, model.mask_id, generator)
    z_stale = corrupt_further(z_t, t, t_stale, model.mask_id, generator)
    # 2. Predict, at the positions masked in z_t; the others are carried over and cost nothing.
    cache = model.refresh(z_stale)
    masked = z_t == model.mask_id
    logits = logits_at(model, z_t, cache, masked)
    # 3. Weight 1/t, divide by all B * L tokens, not by the masked ones.
    loss = _weighted_ce(logits, x, masked, t).mean()
    # 4. The same on the anchor's own prediction, at the positions masked in z_t', weight 1/t'.
    if gamma > 0:
        if not hasattr(model, "anchor_logits"):
            raise ValueError("gamma > 0 needs a model with an anchor: this one has none")
        masked = z_stale == model.mask_id
        logits = model.anchor_logits(cache, masked)
        loss = loss + gamma * _weighted_ce(logits, x, masked, t_stale).mean()
    return loss


@torch.no_grad()
def bound(model, x, steps, refresh_every=1, generator=None, draws=8):
    """Estimate the bound on -log p(x), (B,) float32 in nats per token, without bias.

    steps = T: the T-step bound of sampling with a cache refreshed every K steps. Step i = T..1 has
    t = i/T, weight lambda = 1/i on each masked token, and an anchor of age (T - i) mod K, drawn on
    the same trajectory. The sum over i is T times the mean over a random i: weight T/i = 1/t. As
    alpha_0 = 1 there is no reconstruction term.
    steps = None: T -> infinity with a fresh anchor. The integral over t then makes the number of
    masks n uniform on 1..L and the weight L/n; drawing n itself avoids the tails of 1/t.
    draws: levels i (or n) per row, one in each of that many strata. x: (B, L) int64.
    Raises ValueError unless steps, refresh_every and draws are at least 1.
    """
    if min(refresh_every, draws, 1 if steps is None else steps) < 1:
        raise ValueError("steps, refresh_every and draws must be at least 1")
    B, L = x.shape
    total = torch.zeros(B, device=x.device)
    for j in range(draws):
        u = (j + torch.rand(B, device=x.device, generator=generator)) / draws
        n_levels = L if steps is None else steps
        level = 1 + (u * n_levels).long().clamp(max=n_levels - 1)  # i or n, uniform on 1..n_levels
        t = level / n_levels
        if steps is None:
            order = torch.rand(x.shape, device=x.device, generator=generator).argsort(dim=1)
            z_stale = z_t = torch.where(order < level[:, None], model.mask_id, x)
        else:
            z_t = corrupt(x, t, model.mask_id, generator)
            t_stale = (level + (steps - level) % refresh_every) / steps
            z_stale = corrupt_further(z_t, t, t_stale, model.mask_id, generator)
        masked = z_t == model.mask_id
        logits = logits_at(model, z_t, model.refresh(z_stale), masked)
        total += _weighted_ce(logits, x, masked, t)
    return total / draws


# ---------------------------------------------------------------------------- 4. sampling

REMASK = ("none", "cap", "rescale", "conf", "loop")


def remask_schedule(kind, t, s, eta=None, t_on=0.55, t_off=0.05, alpha_on=0.9):
    """The step from t down to s under a ReMDM schedule: (alpha_t, alpha_s, sigma), floats.

    none: sigma = 0. cap: min(eta, sigma_max), eta = 0.04 unless given. rescale: eta * sigma_max.
    conf: sigma_max, which `sample` splits over the tokens by confidence. loop, from t = 1 down to
    0: alpha rises to alpha_on at t_on, stays there with sigma = eta (0.02) down to t_off, and then
    rises to 1.
    Raises ValueError for an unknown kind or values out of range.
    """
    if kind not in REMASK:
        raise ValueError(f"remask must be one of {', '.join(REMASK)}, got {kind!r}")
    eta = (0.02 if kind == "loop" else 0.04) if eta is None else eta
    if not 0 <= eta <= 1:
        raise ValueError(f"eta must lie in [0, 1], got {eta}")
    if kind != "loop":
        alpha_t, alpha_s = 1 - t, 1 - s
        sigma_max = min(1, (1 - alpha_s) / max(alpha_t, 1e-9))
        sigma = {"none": 0, "cap": min(eta, sigma_max), "rescale": eta * sigma_max}
        return alpha_t, alpha_s, sigma.get(kind, sigma_max)
    if not (0 < t_off < t_on < 1 and 0 < alpha_on < 1 and eta <= (1 - alpha_on) / alpha_on):
        raise ValueError(
            "loop needs 0 < t_off < t_on < 1, 0 < alpha_on < 1 and eta <= (1 - alpha_on) / alpha_on"
        )

    def alpha(time):
        if time > t_on:
            return alpha_on * (1 - time) / (1 - t_on)
        return alpha_on if time > t_off else 1 - (1 - alpha_on) * time / t_off

    sigma = eta if t_off <= s and t <= t_on else 0
    return alpha(t), alpha(s), sigma


def draw_tokens(logits, temperature=1.0, top_p=1.0, generator=None):
    """Draw one token per row of logits (N, V). Returns ids (N,) int64, their probabilities (N,).

    Temperature 0 takes the likeliest. Nucleus: the likeliest tokens until their sum reaches top_p,
    the one that crosses it included; top_p = 0 takes the likeliest, top_p = 1 changes nothing.
    """
    logits = logits.float()
    greedy = temperature < 1e-6
    probs = (logits if greedy else logits / temperature).softmax(dim=-1)
    if greedy:
        ids = logits.argmax(dim=-1)
    else:
        weights = probs
        if top_p < 1:
            ranked, index = probs.sort(dim=-1, descending=True, stable=True)
            outside = ranked.cumsum(dim=-1) - ranked >= top_p  # reached before this token
            outside[:, 0] = False
            weights = probs.scatter(1, index, ranked.masked_fill(outside, 0.0))
        ids = torch.multinomial(weights, 1, generator=generator).squeeze(1)
    return ids, probs.gather(1, ids[:, None]).squeeze(1)


def reverse_step(z, logits, alpha_t, alpha_s, sigma, mask_id, *, fixed=None, reveal=None,
                 confidence=None, temperature=1.0, top_p=1.0, generator=None):
    """One reverse step from z_t (B, L) to z_s (B, L), Eq. 17 with remasking.

    A masked token is revealed with probability (alpha_s - (1 - sigma) alpha_t) / (1 - alpha_t), and
    only then drawn from softmax(logits): the same law as one draw over V tokens and the mask.
    A visible token is remasked with probability sigma and otherwise stays what it is.

    logits: (B, L, V), or a function that gets a (B, L) bool and returns the logits (N, V) there; it
    is only called if a token is revealed. alpha_t <= alpha_s: floats. sigma: float or (B, L), cut
    to its largest valid value min(1, (1 - alpha_s) / alpha_t). fixed: (B, L) bool, never remasked.
    reveal: (B, L) bool, the masked tokens to reveal instead of the random choice.
    confidence: (B, L) float, updated in place with the probability of each revealed token.
    Raises ValueError unless 0 <= alpha_t <= alpha_s <= 1 and alpha_t < 1.
    """
    if not (0 <= alpha_t <= alpha_s <= 1 and alpha_t < 1):
        raise ValueError(f"a step needs alpha_t <= alpha_s in [0, 1], got {alpha_t} and {alpha_s}")
    sigma_max = min(1, (1 - alpha_s) / max(alpha_t, 1e-9))
    sigma = torch.as_tensor(sigma, device=z.device).clamp(0, sigma_max)
    u = torch.rand(z.shape, device=z.device, generator=generator)
    masked = z == mask_id
    p_reveal = (alpha_s - (1 - sigma) * alpha_t) / (1 - alpha_t)  # exactly 1 in the last step
    reveal = masked & (u < p_reveal if reveal is None else reveal)
    remask = ~masked & (u < sigma)
    if fixed is not None:
        remask &= ~fixed
    z = z.masked_fill(remask, mask_id)
    if reveal.any():
        at = logits(reveal) if callable(logits) else logits[reveal]
        z[reveal], prob = draw_tokens(at, temperature, top_p, generator)
        if confidence is not None:
            confidence[reveal] = prob
    return z


@torch.no_grad()
def sample(model, batch_size, seq_len, steps, refresh_every=1, prompt=None, remask="none",
           temperature=1.0, top_p=1.0, generator=None, callback=None, **remask_options):
    """Write text (Algorithm 1). Returns z (B, L) int64 without masks, and stats.

    steps = T, or None for one token per step in random order, the exact limit T -> infinity.
    refresh_every = K: the anchor network runs at steps 0, K, 2K, ...
    prompt: (L,) or (B, L) int64, mask_id where text is wanted; the rest is held fixed.
    callback(step, z, age) is called after every step, with the age of the anchor in steps.
    remask_options: see remask_schedule.
    stats: the calls really made (anchor_calls, denoiser_calls, layer_calls) and steps. There is no
    time input, so a step that reveals nothing needs no prediction, and an anchor that no prediction
    reads needs no computing: both are skipped, which changes no token.
    Raises ValueError for values out of range.
    """
    if min(batch_size, seq_len, refresh_every, 1 if steps is None else steps) < 1:
        raise ValueError("batch_size, seq_len, steps and refresh_every must be at least 1")
    if not (0 <= temperature < math.inf and 0 <= top_p <= 1):
        raise ValueError("temperature must be 0 or more, and top_p must lie in [0, 1]")
    if steps is None and remask != "none":
        raise ValueError("remasking needs a number of steps")
    device = next((p.device for p in getattr(model, "parameters", tuple)()), torch.device("cpu"))
    z = torch.full((batch_size, seq_len), model.mask_id, device=device)
    if prompt is not None:
        if prompt.shape not in (z.shape, z.shape[1:]):
            raise ValueError(f"prompt must have shape {tuple(z.shape)} or {tuple(z.shape[1:])}")
        if prompt.is_floating_point() or prompt.min() < 0 or prompt.max() > model.mask_id:
            raise ValueError(f"prompt must hold integers from 0 to mask_id = {model.mask_id}")
        z = z.copy_(prompt)
    fixed = z != model.mask_id
    order = torch.rand(z.shape, device=device, generator=generator)
    order = order.masked_fill(fixed, 2.0).argsort(dim=1).argsort(dim=1)  # ranks: for steps = None
    confidence = torch.ones(z.shape, device=device)
    n_steps = int((~fixed).sum(dim=1).max()) if steps is None else steps
    stats = {"steps": n_steps, "anchor_calls": 0, "denoiser_calls": 0}
    anchor_canvas = cache = None

    def logits(where):  # reads z as it was before the step that asks
        nonlocal anchor_canvas, cache
        if anchor_canvas is not None:
            cache, anchor_canvas = model.refresh(anchor_canvas), None
            stats["anchor_calls"] += cache is not None  # MDLM has no anchor
        stats["denoiser_calls"] += 1
        return logits_at(model, z, cache, where)

    for j in range(n_steps):
        i = n_steps - j  # the paper counts steps down: i = T..1
        if j % refresh_every == 0:
            anchor_canvas = z  # the anchor is due: computed as soon as a prediction needs it
        alpha_t, alpha_s, sigma = remask_schedule(
            remask, i / n_steps, (i - 1) / n_steps, **remask_options
        )
        if remask == "conf":  # tokens revealed with little confidence are remasked first
            free = (z != model.mask_id) & ~fixed
            share = (-confidence).masked_fill(~free, -1e9).softmax(dim=1)
            sigma = sigma * share * free
        z = reverse_step(
            z, logits, alpha_t, alpha_s, sigma, model.mask_id, fixed=fixed,
            reveal=order == j if steps is None else None, confidence=confidence,
            temperature=temperature, top_p=top_p, generator=generator,
        )
        if callback is not None:
            callback(j, z, j % refresh_every)
    anchor, denoiser = getattr(model, "depths", (0, 0))
    stats["layer_calls"] = stats["anchor_calls"] * anchor + stats["denoiser_calls"] * denoiser
    return z, stats


def layer_calls(config, steps, refresh_every):
    """Layers that TADM or ADLM run in T steps (Eq. 11, S has none): T L_D + ceil(T / K) L_A."""
    return steps * config.n_denoiser + math.ceil(steps / refresh_every) * config.n_anchor
