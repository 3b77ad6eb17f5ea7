"""Data: from text to token shards, and from a step's number to its batch.

`prepare` what a job names -> stores. A store made: `sources` which files, `content` what is in one, `packed` compressed
ones, `parts` the work cut up, `readers` files -> documents, `tokenizer` text <-> ids, `tokenise` a part -> a file, `pool` and `part_worker` by several processes,
`workspace` what outlives them, `assembly` parts -> `writer` -> shards; `upload` to an object store; `megatron` its pairs of
files. A store read: `store`, `stream`; `in_use` keeps it from being replaced meanwhile. `blend` position -> source,
`order` position -> sample, `loader` step -> tensors (the only one with torch).
"""
