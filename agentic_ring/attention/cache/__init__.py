"""Attention to a key/value cache that is sharded along the sequence, for decoding and long prompts."""

from agentic_ring.attention.cache.kv_cache import (
    EMPTY_SLOT,
    CachedLayer,
    KVCache,
    append,
    append_blocks,
    cache_specs,
    empty_cache,
    first_row,
    slots_needed,
    specs_of,
)

__all__ = [
    "EMPTY_SLOT",
    "CachedLayer",
    "KVCache",
    "append",
    "append_blocks",
    "cache_specs",
    "empty_cache",
    "first_row",
    "slots_needed",
    "specs_of",
]
