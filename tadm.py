"""Time-Anchored Diffusion Language Models (TADM, arXiv 2609.37924) in one file.

A masked diffusion language model starts from a canvas of masks and reveals tokens in T reverse steps.
The usual model runs its whole network at every step. TADM splits it in four (Eq. 7-10):

    c = S(z_t)                  token embedding, the shared part: cheap, every step
    h = A(S(z_t'))              anchor network: expensive, every K-th step, then reused (stale)
    h_fused = Phi(c, h)         gated fusion: corrects the stale h with the current c, every step
    logits = D(h_fused)         denoiser, a few layers: every step

It is trained on anchors that are stale on purpose, so that reusing them costs little.
Every model here is a pair of methods, and nothing else is asked of a model:

    cache = model.refresh(z)            # expensive: once every K steps
    logits = model.predict(z, cache)    # cheap: every step; (B, L, V), real tokens only

Notation            paper         here
    clean tokens        x             x          (B, L) int64, values 0..V-1
    noisy tokens        z_t, z_t'     z_t, z_stale; the mask token is mask_id = V
    still visible       alpha_t       1 - t      (log-linear schedule: t is the masked share)
    diffusion time      t, s          t, s       (B,) float32 in [0, 1]; s = t - 1/T
    anchor's time       t' >= t       t_stale
    refresh interval    K             refresh_every; the cache has age k = 0..K-1 steps
    reverse steps       T             steps
    remasking           sigma_t       sigma

Losses and bounds are in nats per token. Scaled down: 6 anchor and 2 denoiser layers (12 and 6 in the
paper), tens of words for its thousand tokens. Left out: time conditioning (off there too), dropout.
"""

from dataclasses import dataclass
from functools import partial

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
        sizes = (self.vocab_size, self.seq_len, self.d_model, self.n_heads, self.n_denoiser)
        if min(sizes) < 1 or self.n_anchor < 0:
            raise ValueError("all sizes must be at least 1, only n_anchor may be 0")
        if self.d_model % (2 * self.n_heads):
            raise ValueError(f"d_model must be divisible by 2 * n_heads, {2 * self.n_heads}")


class Block(nn.Module):
    """One pre-norm Transformer layer, attention in both directions: (B, L, d) -> (B, L, d).
    Given positions at (B, Q), only these ask, and are returned: (B, Q, d)."""

    def __init__(self, config):
        super().__init__()
        d, self.n_heads = config.d_model, config.n_heads
        self.scale = (config.n_anchor + config.n_denoiser) ** -0.5  # the sum of all layers stays O(1)
        self.norm_attn, self.norm_mlp = nn.LayerNorm(d), nn.LayerNorm(d)
        self.norm_q, self.norm_k = (nn.LayerNorm(d // self.n_heads, bias=False) for _ in range(2))
        self.qkv, self.out = nn.Linear(d, 3 * d, bias=False), nn.Linear(d, d, bias=False)
        self.up, self.down = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)
        half = d // self.n_heads // 2
        angle = torch.outer(torch.arange(config.seq_len), 10000.0 ** (-torch.arange(half) / half))
        self.register_buffer("rotary", torch.stack([angle.cos(), angle.sin()]), persistent=False)

    def forward(self, x, at=None):
        B, L, d = x.shape
        qkv = self.qkv(self.norm_attn(x)).view(B, L, 3, self.n_heads, d // self.n_heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each (B, heads, L, d/heads)
        a, b = torch.stack([self.norm_q(q), self.norm_k(k)]).chunk(2, dim=-1)
        cos, sin = self.rotary[:, :L]  # rotary positions: turn each pair of channels by its angle
        q, k = torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)
        if at is not None:
            q, x = q.take_along_dim(at[:, None, :, None], 2), x.take_along_dim(at[..., None], 1)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2)
        x = x + self.scale * self.out(y.flatten(2))
        return x + self.scale * self.down(F.gelu(self.up(self.norm_mlp(x))))


class GatedFusion(nn.Module):
    """Correct a stale anchor h with the current shallow state c, token by token (Eq. 57-59).

    c, h: (B, L, d), the embedding of z_t and the cached anchor of z_t'. Returns h_fused (B, L, d):
    at the start LN(h), whatever c is.
    """

    def __init__(self, d_model):
        super().__init__()
        self.norm_c, self.norm_h, self.norm_out = (nn.LayerNorm(d_model) for _ in range(3))
        self.gate = nn.Linear(2 * d_model, d_model)
        self.up, self.down = nn.Linear(2 * d_model, 4 * d_model), nn.Linear(4 * d_model, d_model)
        nn.init.zeros_(self.down.weight)
        nn.init.zeros_(self.down.bias)

    def forward(self, c, h):
        u = torch.cat([self.norm_c(c), self.norm_h(h)], dim=-1)  # (B, L, 2d)
        g = torch.sigmoid(self.gate(u))  # Eq. 57: one gate per token and channel
        delta = self.down(F.gelu(self.up(u)))  # Eq. 58
        return self.norm_out(h + g * delta)  # Eq. 59


class DiffusionLM(nn.Module):
    """What the models below share: the embedding S, and the last layers with the head.

    The embedding has V + 1 rows and the head V outputs: the mask token can be read, never written.
    """

    def __init__(self, config):
        super().__init__()
        self.config, self.mask_id = config, config.vocab_size
        self.token = nn.Embedding(config.vocab_size + 1, config.d_model)
        self.position = nn.Parameter(torch.empty(config.seq_len, config.d_model))
        self.norm, self.head = nn.LayerNorm(config.d_model), nn.Linear(config.d_model, self.mask_id)
        for p in (self.token.weight, self.position):
            nn.init.normal_(p, std=0.8)  # legible in the sum that the layers add to
        nn.init.constant_(self.norm.weight, 8.0)  # small changes of that sum reach the logits

    def stack(self, n_layers):
        return nn.Sequential(*[Block(self.config) for _ in range(n_layers)])

    def embed(self, z):
        """S: (B, L) int64 -> (B, L, d). Positions are learned, as rotary ones are relative: they
        cannot tell the first mask from the last. Raises ValueError for a canvas beyond seq_len."""
        if z.shape[1] > self.config.seq_len:
            raise ValueError(f"canvas of {z.shape[1]} tokens, seq_len is {self.config.seq_len}")
        return self.token(z) + self.position[: z.shape[1]]

    def read(self, blocks, x, where=None):
        """The last layers and the head: x (B, L, d) -> logits (B, L, V), or (N, V) computed at the
        N True positions of where (B, L) only: the last layer asks nowhere else."""
        if where is None:
            return self.head(self.norm(blocks(x)))
        n = where.sum(dim=1, keepdim=True)
        at = where.int().argsort(dim=1, descending=True, stable=True)[:, : n.max()]  # True ones first
        x = blocks[-1](blocks[:-1](x), at)  # (B, Q, d), the first n of each row are wanted
        return self.head(self.norm(x[torch.arange(at.shape[1], device=x.device) < n]))


class TADM(DiffusionLM):
    """Shared embedding, cached anchor network, gated fusion, small denoiser (Eq. 8-10)."""

    def __init__(self, config):
        super().__init__(config)
        self.depths = (config.n_anchor, config.n_denoiser)  # layers of refresh and of predict
        self.anchor = self.stack(config.n_anchor)
        self.fusion = GatedFusion(config.d_model)
        self.denoiser = self.stack(config.n_denoiser)
        self.anchor_head = nn.Linear(config.d_model, config.vocab_size)  # only for gamma > 0

    def refresh(self, z):
        """h = A(S(z)): (B, L) -> (B, L, d)."""
        return self.anchor(self.embed(z))

    def predict(self, z, cache, where=None):
        """x_theta(z_t, z_t'): logits as in read; only those at masked z are ever used."""
        return self.read(self.denoiser, self.fusion(self.embed(z), cache), where)

    def anchor_logits(self, cache, where):
        """Logits (N, V) of the training-only head on h at the N True positions of where (B, L)."""
        return self.anchor_head(F.layer_norm(cache[where], cache.shape[-1:]))


class ADLM(DiffusionLM):
    """The predecessor (Eq. 5; arXiv 2505.18456): D reads only the anchor's logits, never z."""

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
        return y, self.project(y)  # both cached: same numbers as projecting at every step

    def predict(self, z, cache, where=None):
        return self.read(self.denoiser, cache[1], where)

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

    def predict(self, z, cache, where=None):
        return self.read(self.blocks, self.embed(z), where)


def logits_at(model, z, cache, where):
    """model.predict(z, cache)[where], (N, V), computed at the True positions only where it can be."""
    if isinstance(model, DiffusionLM):
        return model.predict(z, cache, where)
    return model.predict(z, cache)[where]


# ------------------------------------------------------------------------ 2. the forward process


def corrupt(x, t, mask_id, generator=None):
    """Draw z_t from q(z_t | x) (Eq. 1): every token becomes the mask with probability t.

    x: (B, L) int64; t: (B,) float32 in [0, 1]. Returns (B, L) int64.
    """
    u = torch.rand(x.shape, device=x.device, generator=generator)  # in [0, 1): t = 1 masks all
    return torch.where(u < t[:, None], mask_id, x)


def corrupt_further(z_t, t, t_stale, mask_id, generator=None):
    """Draw z_t' from z_t, t' >= t (Eq. 15): a visible token stays with alpha_t' / alpha_t.

    So z_t' never shows what z_t hides: both lie on one trajectory. t, t_stale: (B,) float32.
    Returns (B, L) int64. Raises ValueError if some t' < t.
    """
    if (t_stale < t).any():
        raise ValueError("t_stale must not be smaller than t: an anchor is older than its canvas")
    p_mask = (t_stale - t) / (1 - t).clamp_min(1e-9)  # 1 - alpha_t' / alpha_t, or 0 at t = 1
    return corrupt(z_t, p_mask, mask_id, generator)


def sample_times(batch_size, refresh_choices, steps_choices, generator=None, device=None):
    """Draw the times of a training batch (appendix C.2). Returns t, t_stale: (B,) float32.

    t ~ U(1e-3, 1), "antithetic": one row in each of B equal strata, in random order. K and T come
    from the two lists, the age k from 0..K-1, all per row, and t' = min(1, t + k/T).
    """
    u = torch.rand(5, batch_size, device=device, generator=generator)
    t = 1e-3 + (1 - 1e-3) * (u[0].argsort() + u[1]) / batch_size
    refresh_every = torch.tensor(refresh_choices, device=device)[(u[2] * len(refresh_choices)).long()]
    steps = torch.tensor(steps_choices, device=device)[(u[3] * len(steps_choices)).long()]
    age = (u[4] * refresh_every).long()
    return t, (t + age / steps).clamp(max=1)


# ------------------------------------------------------------------------- 3. loss and bound


def _weighted_ce(logits, x, masked, t, teacher=None, ce=1.0, kl=1.0):
    """(1/L) sum over masked l of CE_l / t: (B,) nats per token. logits: (N, V) at masked (B, L).
    Given a teacher's logits, ce * CE + kl * KL(teacher || model) takes the place of CE."""
    log_q = logits.float().log_softmax(-1)  # float32 under autocast too
    loss = F.nll_loss(log_q, x[masked], reduction="none")
    if teacher is not None:
        log_p = teacher.float().log_softmax(-1)
        loss = ce * loss + kl * (log_p.exp() * (log_p - log_q)).sum(-1)
    row = masked.nonzero()[:, 0]
    return torch.zeros_like(t).index_add(0, row, loss / t[row]) / x.shape[1]


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
    # 3. Weight 1/t, divide by all B * L tokens, not by the masked ones.
    loss = _weighted_ce(logits_at(model, z_t, cache, masked), x, masked, t).mean()
    # 4. The same on the anchor's own prediction, at the positions masked in z_t', weight 1/t'.
    if gamma > 0:
        if not hasattr(model, "anchor_logits"):
            raise ValueError("gamma > 0 needs a model with an anchor: this one has none")
        masked = z_stale == model.mask_id
        logits = model.anchor_logits(cache, masked)
        loss += gamma * _weighted_ce(logits, x, masked, t_stale).mean()
    return loss


@torch.no_grad()
def bound(model, x, steps, refresh_every=1, generator=None, draws=8, teacher=None):
    """Estimate the bound on -log p(x), (B,) float32 in nats per token, without bias. x: (B, L) int64.

    steps = T: the T-step bound of sampling with a cache refreshed every K steps. Step i = T..1 has
    t = i/T, weight lambda = 1/i on each masked token, and an anchor of age (T - i) mod K, drawn on
    the same trajectory. The sum over i is T times the mean over a random i: weight T/i = 1/t. As
    alpha_0 = 1 there is no reconstruction term. steps = None: T -> infinity, fresh anchors; the
    integral over t makes the number of masks n uniform on 1..L, with weight L/n, and is drawn so.
    draws: levels i (or n) per row, one in each of that many strata. teacher: a model; its
    KL(teacher || model) then takes the place of -log p. Raises ValueError for values below 1.
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
        wanted = teacher and logits_at(teacher, z_t, teacher.refresh(z_t), masked)
        total += _weighted_ce(logits, x, masked, t, wanted, ce=0.0)
    return total / draws


# ---------------------------------------------------------------------------- 4. sampling

REMASK = ("none", "cap", "rescale", "conf", "loop")


def remask_schedule(kind, t, s, eta=None, t_on=0.55, t_off=0.05, alpha_on=0.9):
    """The step from t down to s under a ReMDM schedule: (alpha_t, alpha_s, sigma), floats.

    none: sigma = 0. cap: min(eta, sigma_max), eta = 0.04 unless given. rescale: eta * sigma_max.
    conf: sigma_max, which reverse_step splits over the tokens by confidence. loop, from t = 1 down
    to 0: alpha rises to alpha_on at t_on, stays there with sigma = eta (0.02) down to t_off, and
    then rises to 1. Raises ValueError for an unknown kind or values out of range.
    """
    eta = (0.02 if kind == "loop" else 0.04) if eta is None else eta
    if kind not in REMASK or not 0 <= eta <= 1:
        raise ValueError(f"no such schedule: remask {kind!r} of {REMASK}, eta {eta} of [0, 1]")
    if kind != "loop":
        alpha_t, alpha_s = 1 - t, 1 - s
        sigma_max = min(1, (1 - alpha_s) / max(alpha_t, 1e-9))
        sigma = {"none": 0, "cap": min(eta, sigma_max), "rescale": eta * sigma_max}
        return alpha_t, alpha_s, sigma.get(kind, sigma_max)
    if not (0 < t_off < t_on < 1 and 0 < alpha_on < 1 and eta <= (1 - alpha_on) / alpha_on):
        raise ValueError("loop needs 0 < t_off < t_on < 1 and eta <= (1 - alpha_on) / alpha_on")

    def alpha(time):
        if time > t_on:
            return alpha_on * (1 - time) / (1 - t_on)
        return alpha_on if time > t_off else 1 - (1 - alpha_on) * time / t_off

    return alpha(t), alpha(s), eta if t_off <= s and t <= t_on else 0


def draw_tokens(logits, temperature=1.0, top_p=1.0, generator=None):
    """Draw one token per row of logits (N, V). Returns ids (N,) int64, their probabilities (N,).

    Temperature 0 takes the likeliest. Nucleus: the likeliest tokens until their sum reaches top_p,
    the one that crosses it included; top_p = 0 takes the likeliest, top_p = 1 changes nothing.
    """
    if temperature < 1e-6:
        temperature, top_p = 1.0, 0.0
    weights = probs = (logits.float() / temperature).softmax(dim=-1)
    if top_p < 1:
        ranked, index = probs.sort(dim=-1, descending=True, stable=True)
        outside = ranked.cumsum(dim=-1) - ranked >= top_p  # reached before this token
        outside[:, 0] = False
        weights = probs.scatter(1, index, ranked.masked_fill(outside, 0.0))
    ids = torch.multinomial(weights, 1, generator=generator)
    return ids[:, 0], probs.gather(1, ids)[:, 0]


def reverse_step(z, logits, alpha_t, alpha_s, sigma, mask_id, *, fixed=None, reveal=None,
                 confidence=None, by_confidence=False, temperature=1.0, top_p=1.0, generator=None):
    """One reverse step from z_t (B, L) to z_s (B, L), Eq. 17 with remasking.

    A masked token is revealed with probability (alpha_s - (1 - sigma) alpha_t) / (1 - alpha_t), and
    only then drawn from softmax(logits): the same law as one draw over V tokens and the mask.
    A visible token is remasked with probability sigma and otherwise stays what it is.

    logits: (B, L, V), or a function of a (B, L) bool that returns those there, (N, V), called only
    if a token is revealed. alpha_t, alpha_s, sigma: floats, (B, 1) or (B, L); sigma is cut to its
    largest valid value. fixed: (B, L) bool, never remasked. reveal: (B, L) bool, the tokens to reveal
    instead of the random choice. confidence: (B, L) float, updated in place with the probability of
    each revealed token; by_confidence gives the doubtful ones more of sigma. Raises ValueError
    unless 0 <= alpha_t <= alpha_s <= 1 and alpha_t < 1.
    """
    as_tensor = partial(torch.as_tensor, dtype=torch.float32, device=z.device)
    alpha_t, alpha_s, sigma = map(as_tensor, (alpha_t, alpha_s, sigma))
    if not ((0 <= alpha_t) & (alpha_t <= alpha_s) & (alpha_s <= 1) & (alpha_t < 1)).all():
        raise ValueError(f"a step needs alpha_t <= alpha_s in [0, 1], got {alpha_t} and {alpha_s}")
    masked = z == mask_id
    free = ~masked if fixed is None else ~masked & ~fixed
    if by_confidence:
        sigma = sigma * (-confidence).masked_fill(~free, -1e9).softmax(dim=1) * free
    sigma = sigma.clamp_min(0).minimum(((1 - alpha_s) / alpha_t.clamp_min(1e-9)).clamp_max(1))
    u = torch.rand(z.shape, device=z.device, generator=generator)
    p_reveal = (alpha_s - (1 - sigma) * alpha_t) / (1 - alpha_t)  # exactly 1 in the last step
    reveal = masked & (u < p_reveal if reveal is None else reveal)
    z = z.masked_fill(free & (u < sigma), mask_id)
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
    refresh_every = K: the anchor network runs at steps 0, K, 2K, ... prompt: (L,) or (B, L) int64,
    mask_id where text is wanted; the rest is held fixed.
    callback(step, z, age) is called after every step. remask_options: see remask_schedule.
    stats: steps, and the calls really made (anchor_calls, denoiser_calls, layer_calls): as there is
    no time input, a step that reveals nothing needs no prediction, and an anchor that no prediction
    reads is never computed. That changes no token. Raises ValueError for values out of range.
    """
    if min(batch_size, seq_len, refresh_every, 1 if steps is None else steps) < 1:
        raise ValueError("batch_size, seq_len, steps and refresh_every must be at least 1")
    if not (0 <= temperature < float("inf") and 0 <= top_p <= 1):
        raise ValueError("temperature must be 0 or more, and top_p must lie in [0, 1]")
    if steps is None and remask != "none":
        raise ValueError("remasking needs a number of steps")
    device = next((p.device for p in getattr(model, "parameters", tuple)()), torch.device("cpu"))
    z = torch.full((batch_size, seq_len), model.mask_id, device=device)
    if prompt is not None:
        fits = prompt.shape in (z.shape, z.shape[1:]) and not prompt.is_floating_point()
        if not fits or prompt.min() < 0 or prompt.max() > model.mask_id:
            raise ValueError(f"prompt must hold {seq_len} integers from 0 to {model.mask_id}")
        z.copy_(prompt)
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
        schedule = remask_schedule(remask, i / n_steps, (i - 1) / n_steps, **remask_options)
        z = reverse_step(z, logits, *schedule, model.mask_id, fixed=fixed, confidence=confidence,
                         by_confidence=remask == "conf", reveal=order == j if steps is None else None,
                         temperature=temperature, top_p=top_p, generator=generator)
        if callback is not None:
            callback(j, z, j % refresh_every)
    anchor, denoiser = getattr(model, "depths", (0, 0))
    stats["layer_calls"] = stats["anchor_calls"] * anchor + stats["denoiser_calls"] * denoiser
    return z, stats


def layer_calls(config, steps, refresh_every):
    """Eq. 11, layers that TADM or ADLM run in T steps (S has none): T L_D + ceil(T / K) L_A."""
    return steps * config.n_denoiser + -(-steps // refresh_every) * config.n_anchor


# ------------------------------------------------------------------------- 5. post-training


class PairedFusion(nn.Module):
    """Correct the anchor of a finished model by what changed in its shallow state (Eq. 48-56).

    c, c_cached: shallow states of the current canvas and of the anchor's; h_cached, the anchor: all
    (B, L, d). Returns (B, L, d): exactly h_cached if c equals c_cached (M = 0), and at the start.
    """

    def __init__(self, d_model, rank, n_heads=4):
        super().__init__()
        self.n_heads = n_heads
        linear = partial(nn.Linear, bias=False)
        self.reduce_c, self.reduce_h = linear(d_model, rank), linear(d_model, rank)  # W_C, W_H
        self.qkv, self.out = linear(2 * rank, 3 * rank), linear(rank, rank)  # W_Q, W_K, W_V; W_O
        self.mlp = nn.Sequential(linear(rank, 2 * rank), nn.SiLU(), linear(2 * rank, rank))
        self.gate = nn.Sequential(linear(4 * rank, rank), nn.SiLU(), nn.Linear(rank, 1))
        self.up = linear(rank, d_model)  # W_up
        for layer in (self.reduce_c, self.reduce_h, self.qkv, self.out, self.mlp[0], self.mlp[2]):
            nn.init.normal_(layer.weight, std=layer.in_features**-0.5)  # keeps an RMS of 1
        nn.init.normal_(self.qkv.weight[: 2 * rank], std=0.5 * (2 * rank) ** -0.5)  # soft attention
        nn.init.zeros_(self.up.weight)
        nn.init.constant_(self.gate[-1].bias, -3.0)

    def mix(self, z, u):  # phi(Z, U), (B, L, r) each (Eq. 50-51)
        qkv = self.qkv(torch.cat([z, u], dim=-1)).unflatten(-1, (3, self.n_heads, -1))
        y = F.scaled_dot_product_attention(*qkv.permute(2, 0, 3, 1, 4))
        r = z + self.out(y.transpose(1, 2).flatten(2))
        return r + self.mlp(r)

    def remember(self, c_cached, h_cached):  # what stays the same until the next refresh
        square = torch.stack([c_cached, h_cached]).square().mean(-1, keepdim=True)
        s_c, s_h = (square + 1e-6).sqrt()  # Eq. 48: RMS per token
        z_0, u = self.reduce_c(c_cached / s_c), self.reduce_h(h_cached / s_h)  # Eq. 49
        return s_c, s_h, z_0, u, self.mix(z_0, u)

    def forward(self, c, c_cached, h_cached, memory=None):
        s_c, s_h, z_0, u, phi_0 = memory or self.remember(c_cached, h_cached)
        z = self.reduce_c(c / s_c)
        m = self.mix(z, u) - phi_0  # Eq. 52
        g = torch.sigmoid(self.gate(torch.cat([u, z_0, z - z_0, m], dim=-1)))  # Eq. 53: one per token
        return h_cached + g * s_h * self.up(m)  # Eq. 54


class PostTrained(MDLM):
    """A frozen copy of a trained MDLM, split in three, with a cache (Section 4).

    S is the embedding and the first n_shared layers, D the last n_denoiser layers, the norm and the
    head, A what lies between. Only the fusion has gradients. naive switches it off: the stale anchor
    is used as it is (Table 6). Raises ValueError for an impossible split.
    """

    def __init__(self, base, n_shared, n_denoiser, rank, n_heads=4, naive=False):
        super().__init__(base.config)
        self.load_state_dict(base.state_dict())
        self.requires_grad_(False)
        n_anchor = len(self.blocks) - n_shared - n_denoiser
        if min(n_shared, n_anchor - 1, n_denoiser - 1) < 0:
            raise ValueError(f"{len(self.blocks)} layers cannot be split like that")
        self.split, self.naive = (n_shared, n_shared + n_anchor), naive
        again = 0 if naive else n_shared  # a prediction on the anchor's own canvas has S cached
        self.depths = (len(self.blocks) - n_denoiser - again, n_denoiser + again)
        self.fusion = PairedFusion(base.config.d_model, rank, n_heads)

    def shared(self, z):
        return self.blocks[: self.split[0]](self.embed(z))

    def refresh(self, z):
        c = self.shared(z)
        h = self.blocks[self.split[0] : self.split[1]](c)
        return z, c, h, None if self.naive else self.fusion.remember(c, h)

    def predict(self, z, cache, where=None):
        z_cached, c_cached, h, memory = cache
        if torch.is_grad_enabled():
            memory = None  # a rollout's has no gradients
        if not self.naive and (memory is None or not torch.equal(z, z_cached)):  # else M = 0
            h = self.fusion(self.shared(z), c_cached, h, memory)
        return self.read(self.blocks[self.split[1] :], h, where)


@torch.no_grad()
def rollout(model, x, age, steps, remask="none", generator=None, **remask_options):
    """Noise x, cache the anchor, and run the sampler for `age` steps with that anchor (Eq. 13).

    x: (B, L) int64; age: (B,) int64, k per row; steps = T. Returns z (B, L) int64, the cache, and
    the masked share t (B,) that the schedule gives z. Raises ValueError unless age < steps.
    """
    if age.max() >= steps:
        raise ValueError("every age must be smaller than steps")
    table = [remask_schedule(remask, i / steps, (i - 1) / steps, **remask_options)
             for i in range(1, steps + 1)]
    table = torch.tensor(table, device=x.device).T[..., None]  # (3, T, 1): alpha_t, alpha_s, sigma
    t = sample_times(len(x), [1], [1], generator, x.device)[0]
    level = (t * steps + 0.5).long().clamp(max=steps).maximum(age + 1)  # i_a, on the grid
    z = corrupt(x, 1 - table[0, level - 1, 0], model.mask_id, generator)
    cache, confidence = model.refresh(z), torch.ones(z.shape, device=z.device)
    for j in range(int(age.max())):
        step = table[:, (level - j).clamp_min(1) - 1]  # a finished row steps too, for nothing
        z_s = reverse_step(z, partial(logits_at, model, z, cache), *step, model.mask_id,
                           confidence=confidence, by_confidence=remask == "conf", generator=generator)
        z = torch.where((j < age)[:, None], z_s, z)
    return z, cache, 1 - table[0, level - age - 1, 0]


def posttrain_loss(student, teacher, x, steps, ages=(0, 1, 2), kd_weight=1.0, generator=None):
    """Loss of post-training (Eq. 14), a scalar in nats per token; gradients reach the fusion only.

    At the masked positions of the states that the student itself meets: cross-entropy of the clean
    tokens x (B, L), plus kd_weight * KL(teacher || student). Weighted by 1/t, as in t_anelbo.
    """
    # 1. Where the sampler gets with an anchor of age 0, 1 or 2: without gradients.
    row = torch.randint(len(ages), (len(x),), generator=generator, device=x.device)
    age = torch.tensor(ages, device=x.device)[row]
    z, cache, t = rollout(student, x, age, steps, generator=generator)
    # 2. Predict there once more, with gradients, and ask the teacher, which sees all of z.
    masked = z == student.mask_id
    logits = logits_at(student, z, cache, masked)
    wanted = logits_at(teacher, z, teacher.refresh(z), masked).detach()
    return _weighted_ce(logits, x, masked, t, wanted, kl=kd_weight).mean()  # 3. Eq. 14
