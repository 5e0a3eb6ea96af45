"""The decoder of all supported families: what differs between them is in the `ModelConfig`.

Knows tensors and pages, but no request: which token goes where is the caller's to say.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from engine.destination import Destination, Destinations
from engine.kv_cache import KvCache
from engine.models.layers import Linear, Mlp, Place
from engine.models.moe import MoeMlp
from engine.rope_table import cos_sin_table
from engine.sharding import Share, Span
from gpu_ops import cpu_linear, ops
from gpu_ops.batch import AttentionBatch
from gpu_ops.collectives import RankGroup, largest_of_all, reduce_add_rms_norm_
from gpu_ops.unnormed import Unnormed

Tensor = torch.Tensor


class Layer:
    """Weights of one decoder layer. Owned by the engine thread once loaded."""

    def __init__(self, share: Share, index: int, place: Place) -> None:
        config = share.config
        name, hidden, head_dim = f"model.layers.{index}", config.hidden_size, config.head_dim
        attention, every = f"{name}.self_attn", Span.all_of(hidden)
        heads, kv_heads = share.heads.times(head_dim), share.kv_heads.times(head_dim)
        self.name = name
        self.window = config.windows[index]
        self.input_norm = place.empty(hidden)
        self.post_norm = place.empty(hidden)
        self.q_norm = place.empty(head_dim) if config.qk_norm else None
        self.k_norm = place.empty(head_dim) if config.qk_norm else None
        self.qkv = Linear(
            {
                f"{attention}.q_proj": heads,
                f"{attention}.k_proj": kv_heads,
                f"{attention}.v_proj": kv_heads,
            },
            every,
            config.qkv_bias,
            place,
        )
        self.o = Linear(
            {f"{attention}.o_proj": every}, heads, config.o_bias and share.is_first, place
        )
        self.mlp: Mlp | MoeMlp
        if config.moe is not None and config.moe.layers[index]:
            self.mlp = MoeMlp(f"{name}.mlp", hidden, config.moe, share.expert_ffn, place)
        else:
            self.mlp = Mlp(
                f"{name}.mlp", hidden, share.ffn, config.mlp_bias, place, adds_bias=share.is_first
            )

    def destinations(self) -> Destinations:
        yield f"{self.name}.input_layernorm.weight", Destination.of(self.input_norm)
        yield from self.qkv.destinations()
        if self.q_norm is not None and self.k_norm is not None:
            yield f"{self.name}.self_attn.q_norm.weight", Destination.of(self.q_norm)
            yield f"{self.name}.self_attn.k_norm.weight", Destination.of(self.k_norm)
        yield from self.o.destinations()
        yield f"{self.name}.post_attention_layernorm.weight", Destination.of(self.post_norm)
        yield from self.mlp.destinations()

    @property
    def elements(self) -> int:
        """Of its products' weights, as they are held; all experts'."""
        return sum(place.tensor.numel() for _, place in self.destinations())

    def pack(self) -> None:
        for part in (self.qkv, self.o, self.mlp):
            part.pack()


@dataclass(frozen=True, slots=True)
class _Step:
    """What every layer of one forward pass is given."""

    positions: Tensor
    slots: Tensor
    cache: KvCache
    batch: AttentionBatch


class Decoder:
    """A model, or a rank's part of one, ready to be filled and run. Owned by the engine thread
    once loaded.

    share          which part; its config's shapes are this part's
    group          the ranks that hold the other parts, which do all this together; None: it is all
    max_positions  the longest sequence it will be asked for, in tokens
    """

    def __init__(
        self,
        share: Share,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        max_positions: int,
        group: RankGroup | None = None,
    ) -> None:
        place, config = Place(torch.device(device), dtype), share.config
        self.config, self.dtype, self.device = config, dtype, place.device
        self.group = group
        # A product that adds to the residual leaves no room for the ranks' sum.
        self._fuses = group is None and config.fuses
        self._vocabulary = share.vocabulary
        table_shape = share.vocabulary_rows, config.hidden_size
        self.embedding = place.empty(*table_shape)
        self.layers = [Layer(share, index, place) for index in range(config.layers)]
        self.norm = place.empty(config.hidden_size)
        self.head = self.embedding if config.tied else place.empty(*table_shape)
        if share.vocabulary.size < share.vocabulary_rows:
            for table in (self.embedding, self.head):
                table[share.vocabulary.size :] = 0.0
        self.cos_sin = cos_sin_table(config.rope, config.head_dim, max_positions, device)
        self.scale = config.head_dim**-0.5
        self.may_be_captured = True  # known once it is prepared for inference

    def destinations(self) -> dict[str, Destination]:
        """Checkpoint name → where its tensor goes, in the checkpoint's usual order."""
        rows = self._vocabulary
        places = {"model.embed_tokens.weight": Destination.of(self.embedding[: rows.size], rows)}
        for layer in self.layers:
            places.update(layer.destinations())
        places["model.norm.weight"] = Destination.of(self.norm)
        if not self.config.tied:
            places["lm_head.weight"] = Destination.of(self.head[: rows.size], rows)
        return places

    def prepare_for_inference(self) -> None:
        """Once, after loading: weights laid out as the CPU multiplies them fastest, or on a GPU
        the experts' kernels compiled, which takes seconds the first time. With a group, every rank
        does it at once.

        A tied output layer gets a packed copy of the embedding.
        """
        if self.group is not None:
            self.group.fuse_norms(self.config.hidden_size, self.dtype, self.device)
        if self.device.type == "cpu" and cpu_linear.can_pack(self.dtype):
            for layer in self.layers:
                layer.pack()
            self.head = cpu_linear.pack(self.head)
        if self.device.type == "cuda":
            mlps = [layer.mlp for layer in self.layers]
            self.may_be_captured = all(
                mlp.prepare_kernels() for mlp in mlps if isinstance(mlp, MoeMlp)
            )

    def hidden_states(
        self,
        token_ids: Tensor,
        positions: Tensor,
        slots: Tensor,
        cache: KvCache,
        batch: AttentionBatch,
    ) -> Tensor:
        """[n, hidden], normed for `logits`; writes the tokens' keys and values into the cache.

        token_ids, positions, slots  [n] int32, in the batch's order of queries
        Launches on the current stream; does not synchronise; may be captured.
        """
        step = _Step(positions, slots, cache, batch)
        residual, x = self._embed(token_ids)
        rows, weights = len(token_ids), self._fusable()
        if ops.takes_few_rows(rows, *weights):
            return self._few_rows(residual, step)
        if ops.takes_many_rows(rows, *weights):
            return self._many_rows(residual, x, step)
        return self._any_rows(residual, x, step)

    def _embed(self, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        norm, eps = self.layers[0].input_norm, self.config.norm_eps
        if self.group is None:
            return ops.embed_rms_norm(token_ids, self.embedding, norm, eps)
        # Every row is one rank's, and zero on all others: the sum is exact.
        rows = ops.embed_part(token_ids, self.embedding, self._vocabulary.start)
        residual = torch.zeros_like(rows)
        return residual, reduce_add_rms_norm_(rows, residual, norm, eps, self.group)

    def _any_rows(self, residual: Tensor, x: Tensor, step: _Step) -> Tensor:
        eps = self.config.norm_eps
        for index, (layer, next_norm) in enumerate(self._with_next_norms()):
            attended = self._attend(index, layer.qkv(x), step)
            x = self._add_and_norm_(layer.o, attended, residual, layer.post_norm)
            if isinstance(layer.mlp, Mlp):
                active = layer.mlp.active(x)
                x = self._add_and_norm_(layer.mlp.down, active, residual, next_norm)
            else:
                x = reduce_add_rms_norm_(layer.mlp(x), residual, next_norm, eps, self.group)
        return x

    def _add_and_norm_(self, linear: Linear, x: Tensor, residual: Tensor, norm: Tensor) -> Tensor:
        """residual += the product in place; returns its norm."""
        eps = self.config.norm_eps
        if self.group is None and linear.bias is None:
            return ops.linear_add_rms_norm_(x, linear.weight, residual, norm, eps)
        return reduce_add_rms_norm_(linear(x), residual, norm, eps, self.group)

    def _few_rows(self, residual: Tensor, step: _Step) -> Tensor:
        """The same with norms, sums and activation inside the products."""
        eps = self.config.norm_eps
        for index, layer in enumerate(self.layers):
            assert isinstance(layer.mlp, Mlp)
            qkv = ops.norm_linear(residual, layer.input_norm, eps, layer.qkv.weight)
            ops.linear_add_(self._attend(index, qkv, step), layer.o.weight, residual)
            x = ops.norm_linear_silu_mul(residual, layer.post_norm, eps, layer.mlp.gate_up.weight)
            ops.linear_add_(x, layer.mlp.down.weight, residual)
        return ops.rms_norm(residual, self.norm, eps)

    def _many_rows(self, residual: Tensor, normed: Tensor, step: _Step) -> Tensor:
        """The same, a norm begun by the product before it and ended by the one after it."""
        eps = self.config.norm_eps
        x: Tensor | Unnormed = normed
        for index, (layer, next_norm) in enumerate(self._with_next_norms()):
            assert isinstance(layer.mlp, Mlp)
            attended = self._attend(index, ops.many_linear(x, layer.qkv.weight), step)
            x = ops.many_linear_add_(attended, layer.o.weight, residual, layer.post_norm, eps)
            active = ops.many_linear_silu_mul(x, layer.mlp.gate_up.weight)
            x = ops.many_linear_add_(active, layer.mlp.down.weight, residual, next_norm, eps)
        return ops.rms_norm(residual, self.norm, eps)

    def _fusable(self) -> tuple[Tensor, ...]:
        """Weights whose products can be fused with what is around them: a layer's, or none."""
        if not self._fuses:
            return ()
        layer = self.layers[0]
        assert isinstance(layer.mlp, Mlp)
        linears = (layer.qkv, layer.o, layer.mlp.gate_up, layer.mlp.down)
        return tuple(linear.weight for linear in linears)

    def _with_next_norms(self) -> Iterator[tuple[Layer, Tensor]]:
        """Each layer, and the norm that follows it."""
        following = [layer.input_norm for layer in self.layers[1:]] + [self.norm]
        return zip(self.layers, following, strict=True)

    def _attend(self, index: int, qkv: Tensor, step: _Step) -> Tensor:
        """[n, heads * head_dim], of layer `index`."""
        layer = self.layers[index]
        attended = ops.rope_attention(
            qkv,
            layer.q_norm,
            layer.k_norm,
            self.config.norm_eps,
            self.cos_sin,
            step.positions,
            step.slots,
            step.cache.keys[index],
            step.cache.values[index],
            step.batch,
            self.scale,
            layer.window,
        )
        return attended.flatten(1)

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, vocab] in the model's dtype, of rows of `hidden_states`."""
        logits = ops.linear(hidden, self.head)
        if self.group is None:
            return logits
        of_ranks = self.group.all_gather(logits).transpose(0, 1)  # [n, ranks, rows of each]
        return of_ranks.flatten(1)[:, : self.config.vocab_size].contiguous()

    def greedy(self, hidden: Tensor) -> Tensor:
        """[n] int32: the ids of the largest logits, of which each rank finds its own.

        The lowest id among equals, as `ops.sample` at temperature 0.
        """
        assert self.group is not None
        logits = ops.linear(hidden, self.head)
        logits[:, self._vocabulary.size :] = -torch.inf
        return largest_of_all(logits, self._vocabulary.start, self.group)
