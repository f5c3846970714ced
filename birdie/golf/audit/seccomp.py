"""The system calls that a sandbox refuses, as a program for the kernel's filter (seccomp, classic BPF).

One table for both ways to isolate a process. It closes what namespaces leave open: the keyring, sockets (those that are
files are reached by path), other processes' memory, memory that no process is charged for, and what most holes in the
kernel were found behind. Calls newer than the table do not exist in there.
"""

import errno
import platform
import re
import struct

LAST = 450
"""The newest call that the table was written for; from 424 on all architectures number alike."""

_CALLS = """
sockets, files past their path: socket 41 198, socketpair 53 199, name_to_handle_at 303 264, open_by_handle_at 304 265
the keyring: add_key 248 217, request_key 249 218, keyctl 250 219
other processes: ptrace 101 117, process_vm_readv 310 270, process_vm_writev 311 271, kcmp 312 272
and their descriptors and memory: pidfd_getfd 438 438, process_madvise 440 440, process_mrelease 448 448
memory that no process has: shmget 29 194, semget 64 190, msgget 68 186, mq_open 240 180, memfd_create 319 279
and that no other can see: memfd_secret 447 447
namespaces: unshare 272 97, setns 308 268, chroot 161 51, pivot_root 155 41
mounts: mount 165 40, umount2 166 39, open_tree 428 428, move_mount 429 429, mount_setattr 442 442
mounts, the new calls: fsopen 430 430, fsconfig 431 431, fsmount 432 432, fspick 433 433
large parts of the kernel: bpf 321 280, userfaultfd 323 282, perf_event_open 298 241, fanotify_init 300 262
requests in memory: io_uring_setup 425 425, io_uring_enter 426 426, io_uring_register 427 427
kernels and modules: init_module 175 105, finit_module 313 273, delete_module 176 106, kexec_load 246 104
the machine: kexec_file_load 320 294, reboot 169 142, syslog 103 116, acct 163 89, swapon 167 224, swapoff 168 225
its clock: settimeofday 164 170, clock_settime 227 112, adjtimex 159 171, clock_adjtime 305 266
its disks and names: quotactl 179 60, quotactl_fd 443 443, sethostname 170 161, setdomainname 171 162
profiles: lookup_dcookie 212 18
"""
"""Calls that are refused, with their numbers on x86_64 and aarch64."""
_X86_CALLS = (154, 172, 173, 134)  # modify_ldt, iopl, ioperm, uselib
_CLONE, _CLONE3, _MMAP, _IOCTL = (56, 220), 435, (9, 222), (16, 29)
_NAMESPACES = (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000)
_SHARED_AND_ANONYMOUS = 0x21
_TERMINAL_INPUT = (0x5412, 0x541C)  # TIOCSTI, TIOCLINUX

_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
_LOAD, _AND, _EQUAL, _GREATER, _RETURN = 0x20, 0x54, 0x15, 0x25, 0x06
_KILL, _ERRNO, _ALLOW = 0x80000000, 0x00050000, 0x7FFF0000
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16  # offsets in struct seccomp_data


def program(machine: str = platform.machine()) -> bytes | None:
    """Return the filter as an array of struct sock_filter; None if there is none for the machine."""
    if machine not in _ARCHITECTURES:
        return None
    column, architecture = _ARCHITECTURES[machine]
    numbers = re.findall(r"\b[a-z_0-9]+ (\d+) (\d+)", _CALLS)
    denied = [int(number[column]) for number in numbers] + list(() if column else _X86_CALLS)
    arguments = [
        *((_CLONE[column], 0, flag, flag) for flag in _NAMESPACES),
        (_MMAP[column], 3, _SHARED_AND_ANONYMOUS, _SHARED_AND_ANONYMOUS),
        *((_IOCTL[column], 1, 0xFFFFFFFF, request) for request in _TERMINAL_INPUT),
    ]
    refuse, missing = (_RETURN, 0, 0, _ERRNO | errno.EPERM), (_RETURN, 0, 0, _ERRNO | errno.ENOSYS)
    code = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, architecture),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
        *((_GREATER, 0, 1, LAST), missing),  # also those of x32, which begin at 2**30
        *((_EQUAL, 0, 1, _CLONE3), missing),  # its flags lie in memory; the C library then calls clone
    ]
    for number in denied:
        code += [(_EQUAL, 0, 1, number), refuse]
    for number, argument, mask, value in arguments:
        code += [
            (_EQUAL, 0, 5, number),
            (_LOAD, 0, 0, _ARGUMENTS + 8 * argument),
            (_AND, 0, 0, mask),
            (_EQUAL, 0, 1, value),
            refuse,
            (_LOAD, 0, 0, _NUMBER),
        ]
    return b"".join(struct.pack("<HBBI", *line) for line in [*code, (_RETURN, 0, 0, _ALLOW)])
