"""Benchmarks: each module with a `main` is a command, `python -m benchmarks.NAME`; docs/benchmarks.md lists them.

Shared by several benchmarks:

command          flags, the shared data, progress lines on stderr, and the rows on stdout as a table or JSON
processes        durations of alternatives that take turns, memory, and functions in processes of their own
subjects         float models with held-out data: KL, agreement, bits per byte and accuracy of their decoded forms
networks         the CIFAR ResNets and the voice detector of the shared data
bench_model      the GPT that several benchmarks compress, trained once
symbols          tensors that lossless coders are compared on
rivals           lossless coders of other projects; rival_worker runs in the environment that `make rivals` builds
lossy_rivals     lossy ones; record_stack is the compression of the challenge's records
curves           interpolation on curves of bytes against quality, and charts
"""
