"""Benchmarks: each module with a `main` is a command, `python -m benchmarks.NAME`; docs/benchmarks.md lists them.

Shared by several benchmarks:

command          flags, progress lines on stderr, and the rows on stdout as a table or JSON
timing           durations of alternatives that take turns in one process
memory           peak memory of a command, and resident memory of this process
shared_data      folder of the shared data, its texts, and its challenge export
bench_model      the GPT that several benchmarks compress, trained once
loaders          batches of synthetic tokens
quality          KL, agreement, bits per byte and accuracy of a decoded model
resnet           the CIFAR ResNets of the shared data
symbols, streams tensors that coders are compared on, and their form as one byte string
rivals, *_worker coders of other projects; workers run in the environment that `make rivals` builds
seeds            mean and standard error over seeds
plot, curves     charts as SVG, and interpolation on curves of bytes against quality
"""
