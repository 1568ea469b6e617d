"""Batched forward passes of the text encoder and the transformer, for training alone.

The classes' own forwards take lists, pad item by item and build masks: right for a pipeline, slow
for a thousand small items. These take one batch whose captions all fill the same multiple of 32,
use the modules' own weights, and give the same numbers (a test compares them). Every layer is a
pure function of tensors, so that one compiled kernel serves all layers of a kind.

Shapes: B items, L caption tokens padded to a multiple of 32, S sequence, D width, H heads, K head
width, C latent channels.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

PAD_MULTIPLE = 32
Rope = tuple[Tensor, Tensor]
"""Cosines and sines `(S, 1, K/2)`."""

_PATCH = 2


class Forward:
    """The two forwards over one pair of modules; `compile_layers` fuses each layer's kernels."""

    def __init__(
        self, text_encoder: Any, transformer: Any, *, compile_layers: bool = False
    ) -> None:
        self.text_encoder = text_encoder
        self.transformer = transformer
        self._tables: dict[tuple[int, int], tuple[Rope, Rope, Rope]] = {}
        self._text_layer: Callable[..., Tensor] = _text_layer
        self._block: Callable[..., Tensor] = _block
        if compile_layers:
            self._text_layer = torch.compile(_text_layer, dynamic=False, fullgraph=True)
            self._block = torch.compile(_block, dynamic=False, fullgraph=True)

    def encode(self, ids: Tensor) -> Tensor:
        """Caption features `(B, L, D)` of token ids `(B, L)`: `hidden_states[-2]`.

        Attention is causal, so what stands at the padding changes no earlier feature.
        """
        model = self.text_encoder
        config = model.config
        # one-hot rows: the backward of a look-up sorts, which a CUDA graph may not capture
        table = model.embed_tokens.weight
        x = F.linear((ids[..., None] == self._tokens(table)).to(table.dtype), table.T)
        positions = torch.arange(ids.shape[1], device=ids.device)[None]
        cos, sin = model.rotary_emb(x.float(), positions)
        for layer in model.layers[:-1]:
            x = self._text_layer(
                x, cos, sin, config.head_dim, config.rms_norm_eps, *_text_weights(layer)
            )
        return x

    def predict(self, latents: Tensor, time: Tensor, features: Tensor, lengths: Tensor) -> Tensor:
        """The transformer's output `(B, C, 16, 16)`: clean latents minus noise.

        Args:
            latents: Noisy latents `(B, C, 16, 16)`.
            time: `(B,)`, 0 at pure noise and 1 at a clean picture.
            features: `(B, L, D)`, L a multiple of 32.
            lengths: Tokens of each caption, `(B,)`, L - 32 < length <= L.
        """
        model = self.transformer
        key = f"{_PATCH}-1"
        num_caption, eps = features.shape[1], model.config.norm_eps
        image_rope, caption_rope, rope = self._rope(latents, num_caption)
        time_embedding = model.t_embedder(time * model.t_scale)

        x = model.all_x_embedder[key](_patchify(latents))
        for block in model.noise_refiner:
            modulation = block.adaLN_modulation(time_embedding)[:, None]
            x = self._block(x, image_rope, modulation, model.n_heads, eps, *_block_weights(block))

        captions = model.cap_embedder(features)
        padding = torch.arange(num_caption, device=lengths.device)[None] >= lengths[:, None]
        captions = torch.where(padding[..., None], model.cap_pad_token.to(captions.dtype), captions)
        for block in model.context_refiner:
            captions = self._block(
                captions, caption_rope, None, model.n_heads, eps, *_block_weights(block)
            )

        num_image = x.shape[1]
        unified = torch.cat([x, captions.to(x.dtype)], dim=1)
        for block in model.layers:
            modulation = block.adaLN_modulation(time_embedding)[:, None]
            unified = self._block(
                unified, rope, modulation, model.n_heads, eps, *_block_weights(block)
            )
        out = model.all_final_layer[key](unified[:, :num_image], c=time_embedding)
        return _unpatchify(out, latents.shape)

    @staticmethod
    def _tokens(table: Tensor) -> Tensor:
        return torch.arange(table.shape[0], device=table.device)

    def _rope(self, latents: Tensor, num_caption: int) -> tuple[Rope, Rope, Rope]:
        """Tables for the image's tokens, for the caption's, and for both in sequence."""
        side = latents.shape[-1] // _PATCH
        if (side, num_caption) not in self._tables:
            # positions as the module numbers them: captions from 1, the picture as one frame after
            # the padded caption, with its rows and columns on the other two axes
            rows, columns = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
            frame = torch.full_like(rows, num_caption + 1)
            image = torch.stack([frame, rows, columns], dim=-1).reshape(-1, 3)
            caption = torch.zeros(num_caption, 3, dtype=torch.long)
            caption[:, 0] = torch.arange(1, num_caption + 1)
            turns = [
                self.transformer.rope_embedder(ids.to(latents.device))[:, None]
                for ids in (image, caption, torch.cat([image, caption]))
            ]
            tables = [(turn.real.float().clone(), turn.imag.float().clone()) for turn in turns]
            self._tables[side, num_caption] = (tables[0], tables[1], tables[2])
        return self._tables[side, num_caption]


def _rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * weight


def _heads(x: Tensor, head_dim: int) -> Tensor:
    return x.view(*x.shape[:-1], -1, head_dim)


def _turn_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate neighbouring channels of `(B, S, H, K)`, as complex numbers are multiplied."""
    even, odd = x.view(*x.shape[:-1], -1, 2).unbind(-1)
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2)


def _turn_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first half of the channels against the second; cos and sin `(1, S, 1, K)`."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


def _attend(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool) -> Tensor:
    """Attention over `(B, S, H, K)`, heads of k and v repeated where q has more."""
    q, k = q.to(v.dtype), k.to(v.dtype)
    if k.shape[2] != q.shape[2]:
        k, v = (y.repeat_interleave(q.shape[2] // y.shape[2], dim=2) for y in (k, v))
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=is_causal
    )
    return out.transpose(1, 2).flatten(2)


def _text_weights(layer: Any) -> tuple[Tensor, ...]:
    attention, mlp = layer.self_attn, layer.mlp
    return (
        layer.input_layernorm.weight,
        attention.q_proj.weight,
        attention.k_proj.weight,
        attention.v_proj.weight,
        attention.o_proj.weight,
        attention.q_norm.weight,
        attention.k_norm.weight,
        layer.post_attention_layernorm.weight,
        mlp.gate_proj.weight,
        mlp.up_proj.weight,
        mlp.down_proj.weight,
    )


def _text_layer(
    x: Tensor, cos: Tensor, sin: Tensor, head_dim: int, eps: float, *weights: Tensor
) -> Tensor:
    norm1, wq, wk, wv, wo, q_norm, k_norm, norm2, gate, up, down = weights
    y = _rms(x, norm1, eps)
    q, k, v = (_heads(F.linear(y, w), head_dim) for w in (wq, wk, wv))
    cos, sin = cos[:, :, None], sin[:, :, None]
    q = _turn_halves(_rms(q, q_norm, eps), cos, sin)
    k = _turn_halves(_rms(k, k_norm, eps), cos, sin)
    x = x + F.linear(_attend(q, k, v, is_causal=True), wo)
    y = _rms(x, norm2, eps)
    return x + F.linear(F.silu(F.linear(y, gate)) * F.linear(y, up), down)


def _block_weights(block: Any) -> tuple[Tensor, ...]:
    attention, feed_forward = block.attention, block.feed_forward
    return (
        block.attention_norm1.weight,
        attention.to_q.weight,
        attention.to_k.weight,
        attention.to_v.weight,
        attention.to_out[0].weight,
        attention.norm_q.weight,
        attention.norm_k.weight,
        block.attention_norm2.weight,
        block.ffn_norm1.weight,
        feed_forward.w1.weight,
        feed_forward.w2.weight,
        feed_forward.w3.weight,
        block.ffn_norm2.weight,
    )


def _block(
    x: Tensor,
    rope: tuple[Tensor, Tensor],
    modulation: Tensor | None,
    num_heads: int,
    eps: float,
    *weights: Tensor,
) -> Tensor:
    """One transformer block over `(B, S, D)`; modulation `(B, 1, 4 D)` or none."""
    norm1, wq, wk, wv, wo, q_norm, k_norm, norm2, norm3, w1, w2, w3, norm4 = weights
    y = _rms(x, norm1, eps)
    if modulation is not None:
        scale_msa, gate_msa, scale_mlp, gate_mlp = modulation.float().chunk(4, dim=-1)
        y = y * (1 + scale_msa)
    q, k, v = (_heads(F.linear(y, w), y.shape[-1] // num_heads) for w in (wq, wk, wv))
    q = _turn_pairs(_rms(q, q_norm, eps), *rope)
    k = _turn_pairs(_rms(k, k_norm, eps), *rope)
    y = _rms(F.linear(_attend(q, k, v, is_causal=False), wo), norm2, eps)
    x = x + (y if modulation is None else y * gate_msa.tanh())
    y = _rms(x, norm3, eps)
    if modulation is not None:
        y = y * (1 + scale_mlp)
    y = _rms(F.linear(F.silu(F.linear(y, w1)) * F.linear(y, w3), w2), norm4, eps)
    return x + (y if modulation is None else y * gate_mlp.tanh())


def _patchify(latents: Tensor) -> Tensor:
    """`(B, C, H, W)` to tokens `(B, H/2 * W/2, 4 C)`, channels innermost."""
    b, c, h, w = latents.shape
    patches = latents.view(b, c, h // _PATCH, _PATCH, w // _PATCH, _PATCH)
    return patches.permute(0, 2, 4, 3, 5, 1).reshape(b, -1, _PATCH * _PATCH * c)


def _unpatchify(tokens: Tensor, shape: torch.Size) -> Tensor:
    b, c, h, w = shape
    patches = tokens.view(b, h // _PATCH, w // _PATCH, _PATCH, _PATCH, c)
    return patches.permute(0, 5, 1, 3, 2, 4).reshape(b, c, h, w)
