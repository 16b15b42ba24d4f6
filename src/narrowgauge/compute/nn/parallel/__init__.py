"""Layers whose weight is spread over ranks: gathered around each use (FSDP2), or cut for good (tensor parallel)."""
