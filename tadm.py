"""Time-Anchored Diffusion Language Models (TADM, arXiv 2609.37924) in one file.

A masked diffusion language model starts from a canvas of masks and reveals tokens in T reverse
steps. The usual model runs its whole network at each of them. TADM splits it in four (Eq. 7-10):
    c = S(z_t)                  token embedding: cheap, at every step
    h = A(S(z_t'))              anchor network: expensive, at every K-th step, then reused
    h_fused = Phi(c, h)         gated fusion: corrects the stale h with the current c
    logits = D(h_fused)         denoiser: a few layers, at every step

In training the anchor is stale on purpose, as it will be in sampling. Of a model, the loss, the
bound and the sampler need a mask_id and two methods:
    cache = model.refresh(z)            # expensive: once every K steps
    logits = model.predict(z, cache)    # cheap: at every step; (B, L, V), real tokens only

Notation            paper         here
    clean tokens        x             x          (B, L) int64, values 0..V-1
    noisy tokens        z_t, z_t'     z_t, z_stale; the mask token is mask_id = V
    still visible       alpha_t       1 - t      (t: masked share; sampling goes from 1 to 0)
    diffusion time      t, s          t, s       (B,) float32 in [0, 1]; s = t - 1/T
    anchor's time       t' >= t       t_stale
    refresh interval    K             refresh_every; the cache has age k = 0..K-1 steps
    reverse steps       T             steps
    remasking           sigma_t       sigma

Losses and bounds are in nats per token. Smaller than the paper: 6 + 2 layers, not 12 + 6,
tens of tokens, not 1024. No time conditioning, as in the paper. Section 6 is about models
without a mask; of what is before it, only post-training uses it.
"""

import copy
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

# ----------------------------------------------------------------------- 1. the networks


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


def rotate(x, cos, sin):
    """Rotary positions: turn each pair of channels by the angle of its position."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


class Block(nn.Module):
    """One pre-norm Transformer layer, attention in both directions: (B, L, d) -> (B, L, d)."""
    def __init__(self, config):
        super().__init__()
        d, self.n_heads = config.d_model, config.n_heads
        d_head = d // self.n_heads
        # so that the sum of what all layers add stays O(1)
        self.scale = (config.n_anchor + config.n_denoiser) ** -0.5
        self.norm_attn, self.norm_mlp = nn.LayerNorm(d), nn.LayerNorm(d)
        self.norm_q, self.norm_k = (nn.LayerNorm(d_head, bias=False) for _ in range(2))
        self.qkv, self.out = nn.Linear(d, 3 * d, bias=False), nn.Linear(d, d, bias=False)
        self.up, self.down = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)
        frequency = 10000.0 ** (-torch.arange(d_head // 2) / (d_head // 2))
        angle = torch.outer(torch.arange(config.seq_len), frequency)  # (L, d_head / 2)
        self.register_buffer("rotary", torch.stack([angle.cos(), angle.sin()]), persistent=False)

    def forward(self, x):
        B, L, d = x.shape
        qkv = self.qkv(self.norm_attn(x)).view(B, L, 3, self.n_heads, d // self.n_heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each (B, heads, L, d_head)
        cos, sin = self.rotary[:, :L]
        q, k = rotate(torch.stack([self.norm_q(q), self.norm_k(k)]), cos, sin)
        y = F.scaled_dot_product_attention(q, k, v)
        x = x + self.scale * self.out(y.transpose(1, 2).flatten(2))
        return x + self.scale * self.down(F.gelu(self.up(self.norm_mlp(x))))


class GatedFusion(nn.Module):
    """Correct a stale anchor h with the current c, token by token (Eq. 57-59): (B, L, d) each.
    At first h_fused = LN(h), as W_2, b_2 = 0. In u, c comes before h; W_1 widens to 4d.
    Layers: norm_c, norm_h and norm_out are LN; gate is W_g, up W_1, down W_2."""
    def __init__(self, d_model):
        super().__init__()
        self.norm_c, self.norm_h, self.norm_out = (nn.LayerNorm(d_model) for _ in range(3))
        self.gate = nn.Linear(2 * d_model, d_model)
        self.up, self.down = nn.Linear(2 * d_model, 4 * d_model), nn.Linear(4 * d_model, d_model)
        nn.init.zeros_(self.down.weight)  # no correction at first
        nn.init.zeros_(self.down.bias)

    def forward(self, c, h):
        u = torch.cat([self.norm_c(c), self.norm_h(h)], dim=-1)  # (B, L, 2d)
        g = torch.sigmoid(self.gate(u))  # Eq. 57: one gate per token and channel
        delta = self.down(F.gelu(self.up(u)))  # Eq. 58
        return self.norm_out(h + g * delta)  # Eq. 59


class DiffusionLM(nn.Module):
    """What all models share: the embedding S and the head of D. Each adds refresh and denoise,
    and depths, how many layers these run. The mask token can be read, never written."""
    def __init__(self, config):
        super().__init__()
        self.config, self.mask_id = config, config.vocab_size
        self.depths = (config.n_anchor, config.n_denoiser)
        self.token = nn.Embedding(config.vocab_size + 1, config.d_model)
        self.position = nn.Parameter(torch.empty(config.seq_len, config.d_model))
        self.norm, self.head = nn.LayerNorm(config.d_model), nn.Linear(config.d_model, self.mask_id)
        nn.init.normal_(self.token.weight, std=0.8)  # not drowned by what the layers add
        nn.init.normal_(self.position, std=0.05)  # small: copies over a distance come sooner
        # Learns faster than a gain of 1, but the first losses lie far above ln V.
        nn.init.constant_(self.norm.weight, 8.0)

    def stack(self, n_layers):
        return nn.Sequential(*[Block(self.config) for _ in range(n_layers)])

    def embed(self, z):
        """S: (B, L) int64 -> (B, L, d). Raises ValueError beyond seq_len. Positions are learned:
        rotary ones are relative, they cannot tell the first mask from the last."""
        if z.shape[1] > self.config.seq_len:
            raise ValueError(f"canvas of {z.shape[1]} tokens, seq_len is {self.config.seq_len}")
        return self.token(z) + self.position[: z.shape[1]]

    def read(self, y):  # the end of D: (..., d) -> (..., V)
        return self.head(self.norm(y))

    def predict(self, z, cache):
        """x_theta(z_t, z_t'): logits (B, L, V). Only those at masked z are ever used."""
        return self.read(self.denoise(z, cache))


class TADM(DiffusionLM):
    """Shared embedding, cached anchor network, gated fusion, small denoiser."""
    def __init__(self, config):
        super().__init__(config)
        self.anchor = self.stack(config.n_anchor)
        self.fusion = GatedFusion(config.d_model)
        self.denoiser = self.stack(config.n_denoiser)
        self.anchor_head = nn.Linear(config.d_model, config.vocab_size)  # only for gamma > 0

    def refresh(self, z):
        """h = A(S(z)) (Eq. 8): (B, L) int64 -> (B, L, d)."""
        return self.anchor(self.embed(z))

    def denoise(self, z, cache):
        """D(Phi(S(z), h)) without the head (Eq. 10): (B, L) int64 -> (B, L, d)."""
        return self.denoiser(self.fusion(self.embed(z), cache))

    def anchor_logits(self, cache):
        """The anchor's own prediction, (B, L, V); only training uses it."""
        return self.anchor_head(F.layer_norm(cache, cache.shape[-1:]))


class ADLM(DiffusionLM):
    """The predecessor (Eq. 5; arXiv 2505.18456): D reads only the anchor's logits, never z."""
    def __init__(self, config):
        super().__init__(config)
        self.anchor = self.stack(config.n_anchor)
        self.anchor_norm = nn.LayerNorm(config.d_model)
        self.anchor_head = nn.Linear(config.d_model, config.vocab_size)
        self.project = nn.Linear(config.vocab_size, config.d_model)
        self.denoiser = self.stack(config.n_denoiser)

    def refresh(self, z):
        y = self.anchor_head(self.anchor_norm(self.anchor(self.embed(z))))
        return y, self.project(y)  # the anchor's logits (B, L, V), and what D reads, (B, L, d)

    def denoise(self, z, cache):
        return self.denoiser(cache[1])

    def anchor_logits(self, cache):
        return cache[0]


class MDLM(DiffusionLM):
    """The single-stage baseline: one stack of n_anchor + n_denoiser layers, no cache."""
    def __init__(self, config):
        super().__init__(config)
        self.depths = (0, config.n_anchor + config.n_denoiser)
        self.blocks = self.stack(config.n_anchor + config.n_denoiser)

    def refresh(self, z):
        return None

    def denoise(self, z, cache):
        return self.blocks(self.embed(z))


# --------------------------------------------------------------- 2. the forward process

def corrupt(x, t, mask_id, generator=None):
    """Draw z_t from q(z_t | x) (Eq. 1): every token becomes the mask with probability t.
    x: (B, L) int64; t: (B,) float32 in [0, 1]. Returns z_t (B, L) int64."""
    u = torch.rand(x.shape, device=x.device, generator=generator)  # in [0, 1): t = 1 masks all
    return torch.where(u < t[:, None], mask_id, x)


def corrupt_further(z_t, t, t_stale, mask_id, generator=None):
    """Draw z_t' from z_t (Eq. 15): a visible token stays with probability alpha_t' / alpha_t.
    So z_t' never shows what z_t hides. z_t: (B, L) int64; t, t_stale: (B,) float32. Returns
    z_t' (B, L) int64. Raises ValueError if some t' < t."""
    if (t_stale < t).any():
        raise ValueError("t_stale must not be smaller than t: an anchor is older than its canvas")
    p_mask = (t_stale - t) / (1 - t).clamp_min(1e-9)  # 1 - alpha_t' / alpha_t; 0 at t = 1
    return corrupt(z_t, p_mask, mask_id, generator)


def sample_times(batch_size, refresh_choices, steps_choices, generator=None, device=None):
    """Draw the times of a training batch (appendix C.2). Returns t, t_stale: (B,) float32.
    t ~ U(1e-3, 1), "antithetic": one row in each of B equal strata, in random order; and
    t' = min(1, t + k/T), with K and T from the two lists and k from 0..K-1."""
    draw = {"generator": generator, "device": device}
    stratum, u = torch.randperm(batch_size, **draw), torch.rand(2, batch_size, **draw)
    t = 1e-3 + (1 - 1e-3) * (stratum + u[0]) / batch_size
    index = torch.randint(len(refresh_choices), (batch_size,), **draw)
    refresh_every = torch.tensor(refresh_choices, device=device)[index]
    index = torch.randint(len(steps_choices), (batch_size,), **draw)
    steps = torch.tensor(steps_choices, device=device)[index]
    age = (u[1] * refresh_every).long()  # k, uniform on 0..K-1
    return t, (t + age / steps).clamp(max=1)


def refresh_steps(steps, refresh_every, spacing="even"):
    """The steps j = 0..T-1, counted from the start, at which the anchor is computed: a list.
    even: 0, K, 2K, ... as in Algorithm 1. log (not in the paper): as many, closer together at
    the start, as an anchor ages by what is revealed since, measured by what it saw: refresh k
    of n at the visible share c ((1 + c) / c)^(k/n) - c, c = 0.2. Raises ValueError."""
    if min(steps, refresh_every) < 1 or spacing not in ("even", "log"):
        raise ValueError(f"no such refresh: every {refresh_every} of {steps} steps, {spacing!r}")
    if spacing == "even":
        return list(range(0, steps, refresh_every))
    n, c, due = -(-steps // refresh_every), 0.2, [0]
    for k in range(1, n):
        j = round(steps * (c * ((1 + c) / c) ** (k / n) - c))
        due.append(max(j, due[-1] + 1))  # a step that is taken moves to the next free one
    return due


# -------------------------------------------------------------------- 3. loss and bound

def log_probs(model, z, cache):
    """log x_theta at the N masked positions of z, row by row: (N, V), always float32. The others
    are carried over from z (SUBS). Without a mask token (section 6): at all N = B L positions."""
    if model.mask_id is None:
        logits = model.predict(z, cache).flatten(0, 1)
    elif hasattr(model, "denoise"):  # as in predict, but the widest layer runs only here
        logits = model.read(model.denoise(z, cache)[z == model.mask_id])
    else:
        logits = model.predict(z, cache)[z == model.mask_id]
    return logits.float().log_softmax(dim=-1)


def weighted_mean(each, masked, t):
    """(1/L) * sum over masked l of each_l / t: (B,) nats per token.
    each: (N,), one value for each True of masked (B, L), row by row. t: (B,) float32."""
    weight = (1 / t)[:, None].expand(masked.shape)[masked]  # (N,), 1/t of the token's row
    per_token = each.new_zeros(masked.shape).masked_scatter(masked, weight * each)
    return per_token.mean(dim=1)  # over all L tokens, not over the masked ones


def t_anelbo(model, x, t, t_stale, gamma=0.0, generator=None):
    """Training loss: the time-anchored ELBO (Theorem 5.1), T -> infinity; scalar, nats per token.
    x: (B, L) int64 clean tokens; t, t_stale: (B,) float32 from sample_times. gamma > 0:
    supervise the anchor as well, in a model with anchor_logits(cache)."""
    # 1. Noise, and more noise for the anchor: it saw less than the denoiser sees now.
    z_t = corrupt(x, t, model.mask_id, generator)
    z_stale = corrupt_further(z_t, t, t_stale, model.mask_id, generator)
    # 2. Predict the masked tokens of z_t with the stale anchor.
    cache = model.refresh(z_stale)
    log_q = log_probs(model, z_t, cache)
    # 3. Cross-entropy times 1/t, the rate of reveals at t, divided by all B * L tokens.
    masked = z_t == model.mask_id
    ce = F.nll_loss(log_q, x[masked], reduction="none")  # (N,)
    loss = weighted_mean(ce, masked, t).mean()
    # 4. The same for the anchor's own prediction: where z_t' is masked, with weight 1/t'.
    if gamma > 0:
        masked = z_stale == model.mask_id
        log_y = model.anchor_logits(cache)[masked].float().log_softmax(dim=-1)
        ce = F.nll_loss(log_y, x[masked], reduction="none")
        loss = loss + gamma * weighted_mean(ce, masked, t_stale).mean()
    return loss


@torch.no_grad()
def bound(model, x, steps, refresh_every=1, generator=None, draws=8, teacher=None, spacing="even"):
    """Unbiased estimate of the bound on -log p(x): (B,) float32, nats per token. x: (B, L) int64.
    steps = T: for sampling in T steps with the anchors of refresh_steps. The sum over the steps
    i = T..1, with t = i/T and weight 1/i, is estimated from random i with weight T * 1/i = 1/t.
    As alpha_0 = 1 there is no reconstruction term. steps = None: T -> infinity with fresh anchors,
    whatever K is; the integral over t becomes a sum over the number n of masks, uniform on 1..L,
    with weight L/n. draws: how many i (or n) for each row, from as many equal strata. teacher: a
    model; KL(teacher || model) replaces -log p. Raises ValueError for values below 1."""
    if draws < 1:
        raise ValueError("draws must be at least 1")
    levels = x.shape[1] if steps is None else steps
    due = torch.tensor(refresh_steps(levels, refresh_every, spacing), device=x.device)
    total = torch.zeros(len(x), device=x.device)
    for j in range(draws):
        u = (j + torch.rand(len(x), device=x.device, generator=generator)) / draws
        level = 1 + (u * levels).long().clamp(max=levels - 1)  # i or n, uniform on 1..levels
        t = level / levels
        if steps is None:  # exactly n masks, in random places
            rank = torch.rand(x.shape, device=x.device, generator=generator).argsort(dim=1)
            z_t = z_stale = torch.where(rank < level[:, None], model.mask_id, x)
        else:
            j = steps - level  # steps are counted from the start, levels down to 1
            last = due[torch.searchsorted(due, j, right=True) - 1]  # when the anchor was computed
            t_stale = (steps - last) / steps
            z_t = corrupt(x, t, model.mask_id, generator)
            z_stale = corrupt_further(z_t, t, t_stale, model.mask_id, generator)
        masked = z_t == model.mask_id
        log_q = log_probs(model, z_t, model.refresh(z_stale))
        if teacher is None:
            each = F.nll_loss(log_q, x[masked], reduction="none")
        else:
            log_p = log_probs(teacher, z_t, teacher.refresh(z_t))
            each = (log_p.exp() * (log_p - log_q)).sum(dim=-1)
        total += weighted_mean(each, masked, t)
    return total / draws


# ------------------------------------------------------------------------- 4. sampling

REMASK = ("none", "cap", "rescale", "conf", "loop")


def remask_schedule(kind, t, s, eta=None, t_on=0.55, t_off=0.05, alpha_on=0.9):
    """The step from t down to s under a ReMDM schedule: (alpha_t, alpha_s, sigma), floats.
    none: sigma = 0. cap: min(eta, sigma_max). rescale: eta * sigma_max. conf: sigma_max,
    shared out by choose_positions. loop, from t = 1 down: alpha rises to alpha_on at t_on,
    stays there with sigma = eta until t_off, then rises to 1. Default eta: 0.04, loop 0.02.
    A step across t_on or t_off ends at alpha(s) with sigma = 0; the released ReMDM code looks
    at t alone and misses that masked share. Raises ValueError for other kinds and values."""
    eta = (0.02 if kind == "loop" else 0.04) if eta is None else eta
    if kind not in REMASK or not 0 <= eta <= 1:
        raise ValueError(f"no such schedule: remask {kind!r} of {REMASK}, eta {eta} of [0, 1]")
    if kind == "loop":
        if not (0 < t_off < t_on < 1 and 0 < alpha_on < 1 and eta <= (1 - alpha_on) / alpha_on):
            raise ValueError("loop needs 0 < t_off < t_on < 1, eta <= (1 - alpha_on) / alpha_on")

        def alpha(time):
            if time > t_on:
                return alpha_on * (1 - time) / (1 - t_on)
            return alpha_on if time > t_off else 1 - (1 - alpha_on) * time / t_off

        return alpha(t), alpha(s), (eta if t_off <= s and t <= t_on else 0.0)
    alpha_t, alpha_s = 1 - t, 1 - s
    sigma_max = min(1.0, (1 - alpha_s) / max(alpha_t, 1e-9))
    sigma = {"none": 0.0, "cap": min(eta, sigma_max), "rescale": eta * sigma_max, "conf": sigma_max}
    return alpha_t, alpha_s, sigma[kind]


def choose_positions(z, alpha_t, alpha_s, sigma, mask_id, fixed=None, confidence=None,
                     generator=None):
    """Where a reverse step acts (Eq. 17): reveal, remask, both (B, L) bool.
    A masked token is revealed with probability (alpha_s - (1 - sigma) alpha_t) / (1 - alpha_t),
    a visible one is remasked with sigma. alpha_t, alpha_s, sigma: floats or (B, 1); sigma is cut
    to its largest valid value. fixed: (B, L) bool, never remasked. confidence: (B, L) float, the
    probability each token was drawn with: sigma is shared among visible tokens, the low ones get
    more. Raises ValueError unless 0 <= alpha_t <= alpha_s <= 1 and alpha_t < 1."""
    alpha_t, alpha_s, sigma = (torch.as_tensor(v).to(z.device) for v in (alpha_t, alpha_s, sigma))
    if not ((0 <= alpha_t) & (alpha_t <= alpha_s) & (alpha_s <= 1) & (alpha_t < 1)).all():
        raise ValueError(f"a step needs alpha_t <= alpha_s in [0, 1], got {alpha_t} and {alpha_s}")
    masked = z == mask_id
    free = ~masked if fixed is None else ~masked & ~fixed
    if confidence is not None:  # ReMDM's conf: sigma times a softmax of minus the confidence
        sigma = sigma * (-confidence).masked_fill(~free, -1e9).softmax(dim=1) * free
    sigma_max = ((1 - alpha_s) / alpha_t.clamp_min(1e-9)).clamp_max(1)
    sigma = sigma.clamp_min(0).minimum(sigma_max)
    p_reveal = (alpha_s - (1 - sigma) * alpha_t) / (1 - alpha_t)  # exactly 1 in the last step
    u = torch.rand(z.shape, device=z.device, generator=generator)
    return masked & (u < p_reveal), free & (u < sigma)


def draw_tokens(logits, temperature=1.0, top_p=1.0, generator=None):
    """What is revealed: a token for each row of logits (N, V). Returns ids (N,) int64, and
    their probabilities (N,) float32, before the nucleus. Temperature 0 takes the likeliest.
    Nucleus: the likeliest tokens until their sum reaches top_p, 0..1, with the one that
    crosses it (the released ReMDM code drops it). 0: the likeliest alone, 1: all."""
    if temperature < 1e-6:
        temperature, top_p = 1.0, 0.0
    weights = probs = (logits.float() / temperature).softmax(dim=-1)
    if top_p < 1:
        ranked, index = probs.sort(dim=-1, descending=True, stable=True)
        outside = ranked.cumsum(dim=-1) - ranked >= top_p  # the sum was reached before it
        outside[:, 0] = False
        weights = probs.scatter(1, index, ranked.masked_fill(outside, 0.0))
    ids = torch.multinomial(weights, 1, generator=generator)
    return ids[:, 0], probs.gather(1, ids)[:, 0]


def accept_by_entropy(entropy, eta):
    """The positions of least entropy, while the sum of those before is at most eta, in nats: (B, L)
    bool, at least one in each row (Algorithm 2). entropy: (B, L) float."""
    ranked, index = entropy.sort(dim=1, stable=True)
    before = F.pad(ranked.cumsum(dim=1)[:, :-1], (1, 0))
    return torch.zeros_like(entropy, dtype=torch.bool).scatter(1, index, before <= eta)


def most_certain(logits, allowed, order, n=None, budget=None):
    """Where a step acts if the model decides, not chance: (B, L) bool, some of allowed (B, L).
    confidence: in each row the n (B, 1) positions with the likeliest tokens. entropy: those that
    accept_by_entropy finds within the budget."""
    log_p = logits.float().log_softmax(dim=-1)
    if order == "confidence":
        confidence = log_p.amax(dim=-1).masked_fill(~allowed, -torch.inf)
        rank = confidence.argsort(dim=1, descending=True, stable=True).argsort(dim=1)
        return allowed & (rank < n)
    entropy = -(log_p.exp() * log_p).sum(dim=-1)
    return allowed & accept_by_entropy(entropy.masked_fill(~allowed, torch.inf), budget)


def reverse_step(z, logits, alpha_t, alpha_s, sigma, mask_id, *, fixed=None, confidence=None,
                 temperature=1.0, top_p=1.0, generator=None):
    """One reverse step (Eq. 17) from z_t to z_s, (B, L) int64: first where, then what. logits:
    (B, L, V). confidence: updated in place. All else: see choose_positions, draw_tokens."""
    reveal, remask = choose_positions(z, alpha_t, alpha_s, sigma, mask_id, fixed, confidence,
                                      generator)
    z_s = z.masked_fill(remask, mask_id)
    z_s[reveal], prob = draw_tokens(logits[reveal], temperature, top_p, generator)
    if confidence is not None:
        confidence[reveal] = prob
    return z_s


@torch.no_grad()
def sample(model, batch_size, seq_len, steps, refresh_every=1, prompt=None, remask="none",
           temperature=1.0, top_p=1.0, generator=None, callback=None, spacing="even",
           order="random", budget=0.1, **remask_options):
    """Sample text (Algorithm 1). Returns z (B, L) int64 without masks, and stats: steps, and the
    calls really made, anchor_calls, denoiser_calls, layer_calls. Raises ValueError.
    steps = T, or None for one token per step in random order (T -> infinity, if K = 1).
    refresh_every = K, spacing: see refresh_steps. prompt: (L,) or (B, L) int64, mask_id where
    text is wanted; the rest is held fixed. callback(step, z, age): called after every step.
    order: "random" is Eq. 17; "confidence" reveals as many tokens, "entropy" as many as the
    budget allows, maybe in fewer steps: see most_certain. remask_options: see remask_schedule."""
    if min(batch_size, seq_len, refresh_every, 1 if steps is None else steps) < 1:
        raise ValueError("batch_size, seq_len, steps and refresh_every must be at least 1")
    if not (0 <= temperature < float("inf") and 0 <= top_p <= 1):
        raise ValueError("temperature must be 0 or more, and top_p must lie in [0, 1]")
    if order not in ("random", "confidence", "entropy") or not budget >= 0:
        raise ValueError(f"no such order of reveal: {order!r}, budget {budget}")
    if (remask != "none") + (order == "entropy") + (steps is None) > 1:
        raise ValueError("remasking and order entropy: only one of them, and with steps")
    weights = list(model.parameters()) if hasattr(model, "parameters") else []
    device, mask_id = weights[0].device if weights else "cpu", model.mask_id
    z = torch.full((batch_size, seq_len), mask_id, device=device)
    if prompt is not None:
        fits = prompt.shape in (z.shape, z.shape[1:]) and not prompt.is_floating_point()
        if not fits or prompt.min() < 0 or prompt.max() > mask_id:
            raise ValueError(f"prompt must hold {seq_len} integers from 0 to {mask_id}")
        z.copy_(prompt)
    fixed = z != mask_id
    confidence = torch.ones(z.shape, device=device) if remask == "conf" else None
    n_steps = int((~fixed).sum(dim=1).max()) if steps is None else steps
    due = set(refresh_steps(max(1, n_steps), refresh_every, spacing))
    stats = {"steps": n_steps, "anchor_calls": 0, "denoiser_calls": 0}

    for j in range(n_steps):
        # When an anchor is due, keep the canvas. The network runs on it once a step reveals
        # something: with many steps, all of them up to the next anchor may reveal nothing.
        if j in due:
            anchor_canvas, pending, age = z, True, 0
        # Where: without any prediction.
        if steps is None:  # one masked token of each row, all as likely
            u = 1 - torch.rand(z.shape, device=device, generator=generator)
            u = u.masked_fill(z != mask_id, 0)
            z_s, reveal = z.clone(), (u > 0) & (u == u.amax(dim=1, keepdim=True))
        else:
            i = steps - j  # the paper counts down: i = T..1
            alphas = remask_schedule(remask, i / steps, (i - 1) / steps, **remask_options)
            reveal, hide = choose_positions(z, *alphas, mask_id, fixed, confidence, generator)
            z_s = z.masked_fill(hide, mask_id)
        # What: a step that reveals nothing has nothing to predict.
        if reveal.any() or order == "entropy":
            if pending:
                cache, pending = model.refresh(anchor_canvas), False
                stats["anchor_calls"] += cache is not None  # MDLM has no anchor
            logits = model.predict(z, cache)
            stats["denoiser_calls"] += 1
            if order != "random" and j < n_steps - 1:  # where, again; the last step takes all
                n = reveal.sum(dim=1, keepdim=True)
                reveal = most_certain(logits, z == mask_id, order, n, budget)
            z_s[reveal], prob = draw_tokens(logits[reveal], temperature, top_p, generator)
            if confidence is not None:
                confidence[reveal] = prob
        z = z_s
        if callback is not None:
            callback(j, z, age)
        age += 1
        if order == "entropy" and not (z == mask_id).any():
            stats["steps"] = j + 1
            break

    anchor, denoiser = getattr(model, "depths", (0, 0))
    stats["layer_calls"] = stats["anchor_calls"] * anchor + stats["denoiser_calls"] * denoiser
    return z, stats


def layer_calls(config, steps, refresh_every):
    """Eq. 11, if all T steps predict (S has no layers): T L_D + ceil(T/K) L_A."""
    return steps * config.n_denoiser + -(-steps // refresh_every) * config.n_anchor


# -------------------------------------------------------------------- 5. post-training

class PairedFusion(nn.Module):
    """Correct a finished model's anchor by what changed in its shallow state (Eq. 48-56).
    c, c_cached: shallow states of the canvas and of the anchor's; h_cached: the anchor; all
    (B, L, d). Returns (B, L, d): h_cached if c = c_cached. At first W_up = 0, b_g = -3.
    Layers: reduce_c, reduce_h, qkv, out, up; with SiLU mlp (r, 2r, r) and gate (4r, r, 1)."""
    def __init__(self, d_model, rank, n_heads=4):
        super().__init__()
        self.n_heads = n_heads

        def linear(n_in, n_out):
            layer = nn.Linear(n_in, n_out, bias=False)
            nn.init.normal_(layer.weight, std=n_in**-0.5)  # an RMS of 1 stays 1
            return layer

        self.reduce_c, self.reduce_h = linear(d_model, rank), linear(d_model, rank)  # W_C, W_H
        self.qkv, self.out = linear(2 * rank, 3 * rank), linear(rank, rank)  # W_Q, W_K, W_V; W_O
        self.mlp = nn.Sequential(linear(rank, 2 * rank), nn.SiLU(), linear(2 * rank, rank))
        self.gate = nn.Sequential(linear(4 * rank, rank), nn.SiLU(), nn.Linear(rank, 1))
        self.up = nn.Linear(rank, d_model, bias=False)  # W_up
        with torch.no_grad():
            self.qkv.weight[: 2 * rank] *= 0.5  # smaller queries and keys: soft attention
        nn.init.zeros_(self.up.weight)
        nn.init.constant_(self.gate[-1].bias, -3.0)

    def mix(self, z, u):  # phi(Z, U) (Eq. 50-51); z, u: reduced states (B, L, r)
        qkv = self.qkv(torch.cat([z, u], dim=-1)).unflatten(-1, (3, self.n_heads, -1))
        y = F.scaled_dot_product_attention(*qkv.permute(2, 0, 3, 1, 4))
        r = z + self.out(y.transpose(1, 2).flatten(2))
        return r + self.mlp(r)

    def forward(self, c, c_cached, h_cached):
        s_c, s_h = ((v.square().mean(dim=-1, keepdim=True) + 1e-6).sqrt()  # Eq. 48: RMS
                    for v in (c_cached, h_cached))
        z, z_0 = self.reduce_c(c / s_c), self.reduce_c(c_cached / s_c)  # Eq. 49
        u = self.reduce_h(h_cached / s_h)
        m = self.mix(z, u) - self.mix(z_0, u)  # Eq. 52: what the new tokens change
        g = torch.sigmoid(self.gate(torch.cat([u, z_0, z - z_0, m], dim=-1)))  # Eq. 53, per token
        return h_cached + g * s_h * self.up(m)  # Eq. 54


class PostTrained(nn.Module):
    """A frozen copy of a trained MDLM or UniformLM (base), split in three, with a cache (Sec. 4).
    S is the embedding and the first n_shared layers, D the last n_denoiser and the head, A what
    lies between. Only fusion, a PairedFusion, has gradients; naive = True switches it off
    (Table 6). Raises ValueError for an impossible split."""
    def __init__(self, base, n_shared, n_denoiser, rank, n_heads=4, naive=False):
        super().__init__()
        self.base = copy.deepcopy(base).requires_grad_(False)
        self.config, self.mask_id, self.naive = base.config, base.mask_id, naive
        self.split = (n_shared, len(base.blocks) - n_denoiser)
        if not 0 <= n_shared < self.split[1] < len(base.blocks):
            raise ValueError(f"{len(base.blocks)} layers cannot be split like that")
        self.fusion = PairedFusion(base.config.d_model, rank, n_heads)

    @property
    def depths(self):  # S runs once a step: in refresh or, once z has changed, in denoise
        n = self.split[1] if self.naive else self.split[1] - self.split[0]
        return n, len(self.base.blocks) - n

    def shared(self, z):
        return self.base.blocks[: self.split[0]](self.base.embed(z))

    def refresh(self, z):
        c = self.shared(z)
        return z, c, self.base.blocks[self.split[0] : self.split[1]](c)

    def denoise(self, z, cache):
        z_cached, c_cached, h = cache
        # On the anchor's own canvas M = 0 (Eq. 55): nothing to do, but backward needs a graph.
        if not self.naive and (z is not z_cached or torch.is_grad_enabled()):
            h = self.fusion(self.shared(z), c_cached, h)
        return self.base.blocks[self.split[1] :](h)

    def read(self, y):
        return self.base.read(y)

    predict = DiffusionLM.predict  # read and denoise


@torch.no_grad()
def rollout(model, x, age, steps, generator=None):
    """Noise x, cache the anchor, and run the sampler for `age` steps with it (Eq. 13).
    x: (B, L) int64; age: (B,) int64, k of each row; steps = T. Returns z (B, L) int64 (or the
    pair of section 6), the cache, and the time t (B,) of z. ValueError unless age < steps."""
    if age.max() >= steps:
        raise ValueError("every age must be smaller than steps")
    # i_a = T t': t' ~ U(0, 1), put on the grid i/T, with k steps left below it.
    t, _ = sample_times(len(x), [1], [1], generator, x.device)
    i_a = (t * steps + 0.5).long().clamp(max=steps).maximum(age + 1)
    uniform = model.mask_id is None
    if uniform:
        z = corrupt_uniform(x, i_a / steps, model.config.vocab_size, generator)
        z = z, x.new_zeros(*x.shape, model.config.vocab_size, dtype=torch.float32)
    else:
        z = corrupt(x, i_a / steps, model.mask_id, generator)
    cache = model.refresh(z)
    for k in range(int(age.max())):
        i, on = (i_a - k).clamp(min=1)[:, None], (k < age)[:, None]  # on: has steps to make
        logits = model.predict(z, cache)
        if uniform:
            z_s, p = uniform_step(logits, i / steps, generator=generator)
            z = torch.where(on, z_s, z[0]), torch.where(on[..., None], p, z[1])
        else:
            t, s = i / steps, (i - 1) / steps
            z_s = reverse_step(z, logits, 1 - t, 1 - s, 0.0, model.mask_id, generator=generator)
            z = torch.where(on, z_s, z)
    return z, cache, (i_a - age) / steps


def posttrain_loss(student, teacher, x, steps, ages=(0, 1, 2), kd_weight=1.0, generator=None):
    """Loss of post-training (Eq. 14), a scalar in nats per token, on canvases that the student
    sampled: cross-entropy of the masked clean tokens x (B, L) int64, plus kd_weight *
    KL(teacher || student), weighted by 1/t. In a uniform state all tokens count, and alike."""
    # 1. A canvas sampled with an anchor of random age, without gradients.
    index = torch.randint(len(ages), (len(x),), generator=generator, device=x.device)
    age = torch.tensor(ages, device=x.device)[index]
    z, cache, t = rollout(student, x, age, steps, generator=generator)
    # 2. Predict there once more, with gradients, and ask the teacher, which sees all of z.
    log_q = log_probs(student, z, cache)
    log_p = log_probs(teacher, z, teacher.refresh(z)).detach()
    if student.mask_id is None:
        masked, t = torch.ones_like(x, dtype=torch.bool), torch.ones_like(t)
    else:
        masked = z == student.mask_id
    ce = F.nll_loss(log_q, x[masked], reduction="none")  # 3. Eq. 14
    kl = (log_p.exp() * (log_p - log_q)).sum(dim=-1)
    return weighted_mean(ce + kd_weight * kl, masked, t).mean()


# --------------------------------------------------------------------- 6. uniform state
# The base that the paper post-trains has no mask: a noisy token is another token, and all are
# predicted at every step. Its canvas is z (B, L), or a pair (z, p) with the probabilities
# (B, L, V) of the last prediction (self-conditioning); refresh and predict take either.
# Cross-entropy, like Algorithm 2, asks what x is given all tokens of z; Eq. 37 what it is given
# the OTHER tokens, as Eq. 32 adds the token itself.

class UniformLM(MDLM):
    """An MDLM without a mask token (mask_id = None), with self-conditioning."""
    def __init__(self, config):
        super().__init__(config)
        self.mask_id, d = None, config.d_model
        self.token = nn.Embedding(config.vocab_size, d)
        nn.init.normal_(self.token.weight, std=0.8)
        self.norm_p = nn.LayerNorm(d, bias=False)
        self.up_p, self.down_p = nn.Linear(d, 4 * d, bias=False), nn.Linear(2 * d, d, bias=False)

    def embed(self, canvas):
        z, p = canvas if isinstance(canvas, tuple) else (canvas, None)
        if p is None:
            return super().embed(z)
        gate, value = self.up_p(self.norm_p(p @ self.token.weight)).chunk(2, dim=-1)
        return super().embed(z) + self.down_p(F.silu(gate) * value)  # p = 0 adds nothing


def corrupt_uniform(x, t, vocab_size, generator=None):
    """Draw z_t (B, L): every token of x is redrawn from all V tokens with probability t (B,)."""
    noise = torch.randint(vocab_size, x.shape, device=x.device, generator=generator)
    return corrupt(x, t, noise, generator)  # a token in place of the mask


def uniform_posterior(z, probs, alpha_t, alpha_s):
    """q(z_s | z_t, x) (Eq. 32): (B, L, V). probs (B, L, V): x_theta, or one-hot x."""
    V = probs.shape[-1]
    z = F.one_hot(z, V).to(probs.dtype)
    both, new = z * probs, alpha_s - alpha_t
    q = V * alpha_t * both + (alpha_t / alpha_s - alpha_t) * z + new * probs
    q = q + new * (1 - alpha_s) / (V * alpha_s)
    return q / (V * alpha_t * both.sum(dim=-1, keepdim=True) + 1 - alpha_t)


def uniform_nats(log_q, x, z, t):
    """What each position adds to the bound at time t (B,) < 1 (Eq. 37, T -> infinity): (B, L)
    nats. x, z: (B, L), clean and noisy tokens; log_q: (B, L, V), log x_theta."""
    V, t = log_q.shape[-1], t[:, None, None]
    b, b_theta = (V * (1 - t) * p + t for p in (F.one_hot(x, V), log_q.exp()))
    r, r_theta = (v / v.gather(-1, z[..., None]) for v in (b, b_theta))
    return (r_theta - r + r * (r / r_theta).log()).sum(dim=-1) / (V * (1 - t[..., 0]))


def uniform_loss(model, x, generator=None):
    """Training loss: cross-entropy of x (B, L) at all positions, a scalar in nats per token.
    Half of the rows are given their own first prediction."""
    t, _ = sample_times(len(x), [1], [1], generator, x.device)
    z, half = corrupt_uniform(x, t, model.config.vocab_size, generator), len(x) // 2
    p = torch.zeros(*x.shape, model.config.vocab_size, device=x.device)
    with torch.no_grad():  # the times are in random order: the first half is as good as any
        p[:half] = model.predict(z[:half], None).softmax(dim=-1)
    log_q = model.predict((z, p), None).float().log_softmax(dim=-1)
    return F.nll_loss(log_q.transpose(1, 2), x)


@torch.no_grad()
def uniform_bound(model, x, steps, refresh_every=1, generator=None, draws=8, teacher=None):
    """Estimate of Eq. 37: (B,) nats per token, x: (B, L), without self-conditioning. steps = T
    sets the age of the anchor only. teacher: mean KL(teacher || model) instead."""
    V, total = model.config.vocab_size, torch.zeros(len(x), device=x.device)
    for j in range(draws):
        # Wrong tokens are rare and dear at small t: with a uniform t, infinite variance.
        u = (j + torch.rand(len(x), device=x.device, generator=generator)) / draws
        u = u.clamp(1e-3, 0.999)
        t = u.square()  # so dt = 2u du
        age = ((1 - t) * steps).long() % refresh_every
        z, noise = (corrupt_uniform(x, when, V, generator) for when in (t, torch.ones_like(t)))
        z_stale = corrupt_further(z, t, (t + age / steps).clamp(max=1), noise, generator)
        log_q = model.predict(z, model.refresh(z_stale)).float().log_softmax(dim=-1)
        each = uniform_nats(log_q, x, z, t)
        if teacher is not None:
            log_p = teacher.predict(z, teacher.refresh(z)).float().log_softmax(dim=-1)
            each = (log_p.exp() * (log_p - log_q)).sum(dim=-1)
        total += 2 * u * each.mean(dim=1)
    return total / draws


def uniform_step(logits, t, eta=0.1, generator=None, fixed=None):
    """A step of Algorithm 2 at t = n/T, a float or (B, 1). Returns z (B, L) int64: tokens drawn
    where the model is most certain, fresh noise elsewhere; and p (B, L, V) float32.
    fixed: (B, L) bool, a prompt, whose positions use up nothing of eta."""
    t = torch.as_tensor(t, device=logits.device)[..., None]
    logits = logits.float() / (0.4 + 0.4 * t)
    drawn = draw_tokens(logits.flatten(0, 1), generator=generator)[0].view(logits.shape[:2])
    free = torch.ones_like(drawn, dtype=torch.bool) if fixed is None else ~fixed
    accept = most_certain(logits, free, "entropy", budget=eta)
    noise = torch.randint(logits.shape[-1], drawn.shape, device=t.device, generator=generator)
    return torch.where(accept, drawn, noise), logits.softmax(dim=-1)


@torch.no_grad()
def sample_uniform(model, batch_size, seq_len, steps=48, refresh_every=1, prompt=None, eta=0.1,
                   generator=None, callback=None):
    """Sample text (Algorithm 2, with the cache of Algorithm 1). Prompt, callback and results as
    in sample; where text is wanted the prompt holds V. eta: nats that a step may accept.
    Raises ValueError for bad values."""
    V, device = model.config.vocab_size, next(model.parameters()).device
    if min(batch_size, seq_len, steps, refresh_every) < 1 or not eta >= 0:
        raise ValueError("sizes, steps and refresh_every must be at least 1, and eta 0 or more")
    given = torch.full((batch_size, seq_len), V, device=device)
    if prompt is not None:
        if prompt.min() < 0 or prompt.max() > V:
            raise ValueError(f"prompt must hold integers from 0 to {V}")
        given.copy_(prompt)
    fixed = given < V
    z = torch.randint(V, given.shape, device=device, generator=generator)
    z, p = torch.where(fixed, given, z), torch.zeros(*z.shape, V, device=device)
    for j in range(steps):
        canvas, age = (z, p), j % refresh_every
        if age == 0:
            cache = model.refresh(canvas)
        logits = model.predict(canvas, cache)
        z, p = uniform_step(logits, 1 - j / steps, eta, generator, fixed)
        if j == steps - 1:
            z = logits.argmax(dim=-1)  # the last step takes the likeliest tokens
        z = torch.where(fixed, given, z)
        if callback is not None:
            callback(j, z, age)
    n = 0 if cache is None else -(-steps // refresh_every)
    layers = n * model.depths[0] + steps * model.depths[1]
    return z, {"steps": steps, "anchor_calls": n, "denoiser_calls": steps, "layer_calls": layers}
