"""Data: from text to token shards, and from a step number to its batch.

Creating a store: `prepare` resolves the sources of a job to stores; `sources` lists files, `content` detects file
types, `packed` decompresses, `parts` splits the work, `readers` reads documents, `chat` and `chat_template` render
conversations, `mask` says which tokens count in the loss, `tokenizer` converts text and ids, `tokenise` processes one
part, `pool` and `part_worker` run parts in parallel, `workspace` keeps progress across restarts, `assembly` combines
parts, `writer` writes shards; `upload` to an object store; `megatron` .bin/.idx pairs.
Reading: `store`, `stream`; `in_use` locks a store against replacement. `blend` position -> source, `order` position ->
sample, `loader` step -> tensors (the only module with torch).
"""
