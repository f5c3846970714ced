"""The machine that a process runs on.

callbacks      types of progress, message and stop callbacks, and a progress bar
context        device, ranks, log, progress and stop of a piece of work, in one value
device         choice of device and dtype
distributed    process group and collectives
files          atomic writes, and reads of files that only this user can have written
names          names that come from a file, before they are joined to a folder
platform       what differs between systems, each with a portable way
outputs        where a file or folder may be written
hub            requests to the Hugging Face Hub: retries, and failures in one sentence
kernels        functions that numba compiles, and their files on disk
parsing        JSON of others, whole numbers
provenance     versions, machine and commit of a result, seconds of its start
ranges         named ranges of a training step, for torch's profiler
regular        regular files, the only kind that is opened for reading
settings       settings and random generators of the process, put back after code of others
structured     JSON and TOML files of runs, which may be damaged
threads        memory that work in several threads shares
torch_compile  torch.compile with a fallback to eager mode
"""
