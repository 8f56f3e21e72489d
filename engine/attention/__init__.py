"""Attention over paged KV memory, registered through transformers' AttentionInterface."""
