"""Triton kernels of a mixture of experts. `cuda_moe.py` launches them and says what tensors hold.

An entry is one (token, rank) pair: entry = token * TOP_K + rank. Entries are sorted by expert into
blocks of BLOCK_M; a block has one expert, and what is left of its last one is filled up with the
number of entries, which stands for none. So a product's program knows from its index which block
it computes, and every expert's weights are read for its own blocks alone.

Rules
- Shapes are constants: one program per model, and offsets whose alignment the compiler sees.
- A float sum runs in an order that the constants settle: no atomics, no splitting of k.
- OVERLAP keeps the rules of `cuda_launch.py`: wait first, then let the next kernel start.
- Nothing here reads outside of its tensors whatever the logits are, NaN included.
"""

import triton
import triton.language as tl
from triton.language.extra import cuda


@triton.jit
def _begin(OVERLAP: tl.constexpr):
    if OVERLAP:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()


@triton.jit
def _order(x):
    """An int64 whose high half sorts like x; NaN is above all, and the zeros are equal."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return tl.where(x == x, bits, 0x7FFFFFFF).to(tl.int64) << 32


@triton.jit
def route(
    logits, weights, ids, counts, tokens,
    EXPERTS: tl.constexpr, COLUMNS: tl.constexpr, TOP_K: tl.constexpr, RANKS: tl.constexpr,
    RENORMALISE: tl.constexpr, ROWS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Experts of ROWS tokens, their weights, and how many entries each expert has of these."""
    _begin(OVERLAP)
    part = tl.program_id(0)
    row = part * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    rank = tl.arange(0, RANKS)
    inside = (row < tokens)[:, None] & (column < EXPERTS)[None, :]
    at = row.to(tl.int64)[:, None] * EXPERTS + column[None, :]
    x = tl.load(logits + at, mask=inside, other=float("-inf")).to(tl.float32)
    largest = tl.max(x, 1)
    exponentials = tl.exp(x - largest[:, None])
    # The lowest of equals has the largest key. Columns beyond the experts are below all of them.
    taken = -9223372036854775807
    keys = tl.where((column < EXPERTS)[None, :], _order(x) | (COLUMNS - 1 - column)[None, :], taken)
    chosen = tl.zeros((ROWS, RANKS), tl.int32)
    shares = tl.zeros((ROWS, RANKS), tl.float32)
    for index in tl.static_range(TOP_K):
        best = COLUMNS - 1 - (tl.max(keys, 1) & (COLUMNS - 1)).to(tl.int32)
        hit = column[None, :] == best[:, None]
        share = tl.sum(tl.where(hit, exponentials, 0.0), 1)
        chosen = tl.where(rank[None, :] == index, best[:, None], chosen)
        shares = tl.where(rank[None, :] == index, share[:, None], shares)
        keys = tl.where(hit, taken, keys)
    if RENORMALISE:
        total = tl.sum(shares, 1)
    else:
        total = tl.sum(exponentials, 1)
    entry = row[:, None] * TOP_K + rank[None, :]
    wanted = (row < tokens)[:, None] & (rank < TOP_K)[None, :]
    tl.store(weights + entry, shares / total[:, None], mask=wanted)
    tl.store(ids + entry, chosen, mask=wanted)
    count = tl.sum(tl.where(inside & (keys == taken), 1, 0), 0)
    tl.store(counts + part * EXPERTS + column, count, mask=column < EXPERTS)


@triton.jit
def align(
    ids, counts, sorted_entries, block_experts, block_count, entries, parts,
    EXPERTS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_M: tl.constexpr, PARTS: tl.constexpr,
    CHUNK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Places one expert's entries, in their own order, behind those of the experts before it."""
    _begin(OVERLAP)
    expert = tl.program_id(0)
    column = tl.arange(0, COLUMNS)
    total = tl.zeros((COLUMNS,), tl.int32)
    for begin in range(0, parts, PARTS):
        part = begin + tl.arange(0, PARTS)
        known = (part < parts)[:, None] & (column < EXPERTS)[None, :]
        at = part[:, None] * EXPERTS + column[None, :]
        total += tl.sum(tl.load(counts + at, mask=known, other=0), 0)
    blocks = (total + BLOCK_M - 1) // BLOCK_M
    first = tl.sum(tl.where(column < expert, blocks, 0), 0)
    own = tl.sum(tl.where(column == expert, total, 0), 0)
    own_blocks = (own + BLOCK_M - 1) // BLOCK_M
    if expert == EXPERTS - 1:
        tl.store(block_count, first + own_blocks)
    if own > 0:
        for begin in range(0, own_blocks, 64):
            block = begin + tl.arange(0, 64)
            tl.store(block_experts + first + block, expert, mask=block < own_blocks)
        filled = own + tl.arange(0, BLOCK_M)
        tl.store(
            sorted_entries + first * BLOCK_M + filled, entries, mask=filled < own_blocks * BLOCK_M
        )
        place = first * BLOCK_M - 1
        for begin in range(0, entries, CHUNK):
            entry = begin + tl.arange(0, CHUNK)
            is_own = tl.load(ids + entry, mask=entry < entries, other=-1) == expert
            rank = tl.cumsum(is_own.to(tl.int32), 0)
            tl.store(sorted_entries + place + rank, entry, mask=is_own)
            place += tl.sum(is_own.to(tl.int32), 0)


@triton.jit
def _start(BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WEIGHTS_FIRST: tl.constexpr):
    if WEIGHTS_FIRST:
        return tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    else:
        return tl.zeros((BLOCK_M, BLOCK_N), tl.float32)


@triton.jit
def _add_product(x, w, sums, WEIGHTS_FIRST: tl.constexpr):
    """sums + x wᵀ; or its transpose: warpgroups need 64 rows, which blocks of few tokens lack."""
    if WEIGHTS_FIRST:
        return tl.dot(w, tl.trans(x), sums, input_precision="ieee")
    else:
        return tl.dot(x, tl.trans(w), sums, input_precision="ieee")


@triton.jit
def gate_up(
    x, w13, hidden, sorted_entries, block_experts, block_count, entries,
    SIZE: tl.constexpr, FFN: tl.constexpr, TOP_K: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, WEIGHTS_FIRST: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """silu(gate) * up of one block's entries: BLOCK_N columns."""
    _begin(OVERLAP)
    tiles: tl.constexpr = (FFN + BLOCK_N - 1) // BLOCK_N
    block = tl.program_id(0) // tiles
    # Before the branch, so that all three are on their way at once; there is room for every block.
    used = tl.load(block_count)
    expert = tl.load(block_experts + block).to(tl.int64)
    entry = tl.load(sorted_entries + block * BLOCK_M + tl.arange(0, BLOCK_M))
    if block < used:
        token = tl.where(entry < entries, entry, 0) // TOP_K
        n = tl.program_id(0) % tiles * BLOCK_N + tl.arange(0, BLOCK_N)
        k = tl.arange(0, BLOCK_K)
        x_at = x + token.to(tl.int64)[:, None] * SIZE + k[None, :]
        gate_at = w13 + expert * (2 * FFN * SIZE) + (n % FFN)[:, None] * SIZE + k[None, :]
        up_at = gate_at + FFN * SIZE
        gate = _start(BLOCK_M, BLOCK_N, WEIGHTS_FIRST)
        up = _start(BLOCK_M, BLOCK_N, WEIGHTS_FIRST)
        for begin in range(0, SIZE, BLOCK_K):
            if SIZE % BLOCK_K == 0:
                rows = tl.load(x_at + begin)
                gate = _add_product(rows, tl.load(gate_at + begin), gate, WEIGHTS_FIRST)
                up = _add_product(rows, tl.load(up_at + begin), up, WEIGHTS_FIRST)
            else:
                known = (begin + k < SIZE)[None, :]
                rows = tl.load(x_at + begin, mask=known, other=0.0)
                of_gate = tl.load(gate_at + begin, mask=known, other=0.0)
                of_up = tl.load(up_at + begin, mask=known, other=0.0)
                gate = _add_product(rows, of_gate, gate, WEIGHTS_FIRST)
                up = _add_product(rows, of_up, up, WEIGHTS_FIRST)
        out = gate / (1.0 + tl.exp(-gate)) * up
        if WEIGHTS_FIRST:
            out = tl.trans(out)
        tl.store(
            hidden + entry.to(tl.int64)[:, None] * FFN + n[None, :],
            out.to(hidden.dtype.element_ty),
            mask=(entry < entries)[:, None] & (n < FFN)[None, :],
        )


@triton.jit
def down(
    hidden, w2, weights, results, sorted_entries, block_experts, block_count, entries,
    SIZE: tl.constexpr, FFN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, WEIGHTS_FIRST: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """The weighted output of one block's entries: BLOCK_N columns."""
    _begin(OVERLAP)
    tiles: tl.constexpr = (SIZE + BLOCK_N - 1) // BLOCK_N
    block = tl.program_id(0) // tiles
    used = tl.load(block_count)
    expert = tl.load(block_experts + block).to(tl.int64)
    entry = tl.load(sorted_entries + block * BLOCK_M + tl.arange(0, BLOCK_M))
    if block < used:
        row = tl.where(entry < entries, entry, 0)
        weight = tl.load(weights + row)
        n = tl.program_id(0) % tiles * BLOCK_N + tl.arange(0, BLOCK_N)
        k = tl.arange(0, BLOCK_K)
        x_at = hidden + row.to(tl.int64)[:, None] * FFN + k[None, :]
        w_at = w2 + expert * (SIZE * FFN) + (n % SIZE)[:, None] * FFN + k[None, :]
        sums = _start(BLOCK_M, BLOCK_N, WEIGHTS_FIRST)
        for begin in range(0, FFN, BLOCK_K):
            if FFN % BLOCK_K == 0:
                rows, columns = tl.load(x_at + begin), tl.load(w_at + begin)
            else:
                known = (begin + k < FFN)[None, :]
                rows = tl.load(x_at + begin, mask=known, other=0.0)
                columns = tl.load(w_at + begin, mask=known, other=0.0)
            sums = _add_product(rows, columns, sums, WEIGHTS_FIRST)
        if WEIGHTS_FIRST:
            sums = tl.trans(sums)
        tl.store(
            results + entry.to(tl.int64)[:, None] * SIZE + n[None, :],
            (sums * weight[:, None]).to(results.dtype.element_ty),
            mask=(entry < entries)[:, None] & (n < SIZE)[None, :],
        )


@triton.jit
def combine(
    results, out,
    SIZE: tl.constexpr, TOP_K: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """BLOCK elements of one token: the sum of its experts' outputs, in order of rank."""
    _begin(OVERLAP)
    tiles: tl.constexpr = (SIZE + BLOCK - 1) // BLOCK
    token = (tl.program_id(0) // tiles).to(tl.int64)
    n = tl.program_id(0) % tiles * BLOCK + tl.arange(0, BLOCK)
    known = n < SIZE
    sums = tl.zeros((BLOCK,), tl.float32)
    for rank in tl.static_range(TOP_K):
        at = results + (token * TOP_K + rank) * SIZE + n
        sums += tl.load(at, mask=known, other=0.0).to(tl.float32)
    tl.store(out + token * SIZE + n, sums.to(out.dtype.element_ty), mask=known)
