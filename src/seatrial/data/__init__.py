"""Data: from text to token shards, and from a step's number to its batch.

`tokenizer` text <-> ids, `sources` which files, `readers` files -> documents, `prepare` documents -> store,
`store` token shards on disk, `order` position -> sample, `loader` step -> tensors (the only one with torch).
"""
