// How a decode step's attention is shared out: prepare.cu makes a plan, decode_attention.cu follows it.
#pragma once
#include "device.cuh"

constexpr int TILE = 16;  // keys: the rows of a tensor core operand

struct __align__(16) Sequence {
    int begin, end;  // its tiles, of all laid end to end
    int kv_len;
    int row;  // of the page table
    int first_span, last_span;
    int first_key;  // of its first tile
    int unused;
};

struct __align__(16) Span {
    int begin, end;  // tiles
    int sequence;    // of the first tile
    int page;        // in which the first tile lies; -1: not looked up
    Sequence first;  // a copy: one load tells a block where to begin
};
