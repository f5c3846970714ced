"""From text to batches: corpus → tokenizer → shards → batches, and the bytes of each token.

corpus           text sources with a deterministic held-out split
tokenizer        raw bytes and SentencePiece BPE, with and without CaseOps: encode, decode, train
caseops          capitals as operators before lowercase letters
byte_accounting  UTF-8 bytes of each token, and a comparison with the decoded text
shards           the challenge's `.bin` files: read, write, validate
byte_sidecar     bytes of each validation token, for tokenizers whose ids do not determine them
dataset          a folder of shards: totals, dataset.json, and the check of a tokenizer
prepare          corpus + tokenizer → shards in the challenge's folder layout
published        which files of a repository on the Hugging Face Hub make up a published data set
download         a published data set → the same layout, verified and counted
sampler          order in which training reads the shards
batches          shards → training batches: resumable, prefetched, split over ranks
"""
