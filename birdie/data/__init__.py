"""From text to batches: corpus → tokenizer → shards → batches, and what a token weighs in bytes.

corpus           text sources with a fixed held-out part
tokenizer        bytes and SentencePiece BPE, with CaseOps or without: encode, decode, train
caseops          capitals as operators before small letters
byte_accounting  the UTF-8 bytes each token stands for, and a check of that against decoded text
shards           the challenge's `.bin` files: read, write, validate
sidecar          the bytes of each validation token, where ids do not tell
dataset          a folder of shards: its totals, and whether a tokenizer made it
prepare          corpus + tokenizer → shards in the challenge's layout
hub              a repository on the Hugging Face hub: its listing, and its files proven whole
published        which of these files make up one data set of the challenge
fetch            a published data set → the same layout, fetched, checked and counted
batches          shards → training batches: memory-mapped, resumable, prefetched, split over ranks
"""
