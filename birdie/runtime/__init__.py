"""The machine a process runs on: device, process group, atomic file writes, provenance, start-up time, NVTX."""
