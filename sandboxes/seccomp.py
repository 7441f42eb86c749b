"""Builds the seccomp filter of a sandbox: an allow-list in classic BPF, in pure Python.

Allowed: files, memory, processes, threads, time, signals, pipes and Unix sockets. Everything else is refused, also
system calls that a newer kernel adds. Refused on purpose, and why:

* ptrace, process_vm_*, pidfd_getfd, kcmp: reading another process.
* prlimit64 of another pid, setpriority, sched_set*, ioprio_set: these need only the same uid, so agent code could
  cripple the runner (pid 1), and the next lease with it.
* mount, unshare, setns, chroot, clone with CLONE_NEW*, clone3: new namespaces.
* shmget, msgget, semget, mq_open, keyrings, setxattr, FS_IOC_SETFLAGS: state that would outlive a lease.
* memfd_create: files that no disk limit counts.
* inotify, F_NOTIFY, flock, leases, OFD locks, F_SET_RW_HINT: all sandboxes see the same files below /usr, and by these
  one could tell another something. A filter cannot see which file a descriptor is, so they are refused everywhere;
  POSIX locks stay, which SQLite needs, and are cut off by a mount of /usr for each sandbox (launcher.py).
* fadvise64, readahead, mincore, preadv2 and pwritev2 with flags: these drop, load or probe pages of the host's cache.
* socket other than AF_UNIX, bpf, perf_event_open, userfaultfd, io_uring, splice: attack surface that no tool needs.
* landlock_add_rule: the runner scopes signals by a ruleset without rules; nothing else of Landlock is needed.
* timer_create: the kernel would send SIGCONT for it, and wake a process that was stopped so that another agent, or the
  host, can work undisturbed. Answered by ENOSYS, on which `timeout` and others use an older call.
* madvise(MADV_MERGEABLE), prctl(PR_SET_MEMORY_MERGE): the time of a write to a merged page tells whether another sandbox
  has the same page.
* setrlimit and prlimit64 of RLIMIT_CORE, which the launcher has set to 1: for any other value the kernel would run the
  program of the host that collects core dumps, as root and with the memory of the agent as input.
* prctl(PR_SCHED_CORE): a cookie of its own keeps the second thread of a core idle, a CPU that no limit counts.
* TIOCSTI and TIOCLINUX: typing into someone else's terminal.

Not covered: kernel bugs that an allowed call can reach. Use gVisor or a virtual machine against those.
"""

import errno
import platform
import struct

# Constants of linux/seccomp.h, linux/audit.h and linux/sched.h.
RETURN_ALLOW = 0x7FFF0000
RETURN_KILL_PROCESS = 0x80000000
RETURN_ERRNO = 0x00050000
AUDIT_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

# Not CLONE_NEWTIME: clone reads that bit as part of the exit signal; only clone3 and unshare take it.
CLONE_NEW_FLAGS = 0x02000000 | 0x00020000 | 0x04000000 | 0x08000000 | 0x10000000 | 0x20000000 | 0x40000000
ADDRESS_FAMILY_UNIX = 1
# TIOCSTI, TIOCLINUX, FS_IOC_SETFLAGS, FS_IOC_FSSETXATTR
IOCTLS_REFUSED = (0x5412, 0x541C, 0x40086602, 0x401C5820)
# From here on both architectures share numbers. Libraries try such calls first and fall back on ENOSYS, but not on
# EPERM. So clone3 (435) makes glibc fall back to clone, whose flags a filter can read.
FIRST_MODERN_NUMBER = 424

# name: (x86_64, aarch64), for calls that are allowed or refused by one of their arguments
JUDGED = {
    "clone": (56, 220),
    "ioctl": (16, 29),
    "socket": (41, 198),
    "socketpair": (53, 199),
    "prlimit64": (302, 261),
    "fcntl": (72, 25),
    "preadv2": (327, 286),
    "pwritev2": (328, 287),
    "madvise": (28, 233),
    "prctl": (157, 167),
    "setrlimit": (160, 164),
}
PR_SCHED_CORE, PR_SET_MEMORY_MERGE = 62, 67
RLIMIT_CORE = 4
TIMER_CREATE = (222, 107)
MADV_MERGEABLE = 12
# F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_SETFL, F_GETLK, F_SETLK, F_SETLKW, F_DUPFD_CLOEXEC, F_GETPIPE_SZ
FCNTLS_ALLOWED = (0, 1, 2, 3, 4, 5, 6, 7, 1030, 1032)

# name:x86_64:aarch64, with "-" where the architecture has no such call
ALLOWED = """
read:0:63 write:1:64 open:2:- close:3:57 stat:4:- fstat:5:80 lstat:6:- poll:7:- lseek:8:62 mmap:9:222 mprotect:10:226
munmap:11:215 brk:12:214 rt_sigaction:13:134 rt_sigprocmask:14:135 rt_sigreturn:15:139 pread64:17:67 pwrite64:18:68
readv:19:65 writev:20:66 access:21:- pipe:22:- select:23:- sched_yield:24:124 mremap:25:216 msync:26:227
dup:32:23 dup2:33:- pause:34:- nanosleep:35:101 getitimer:36:102 alarm:37:-
setitimer:38:103 getpid:39:172 sendfile:40:71 connect:42:203 accept:43:202 sendto:44:206 recvfrom:45:207
sendmsg:46:211 recvmsg:47:212 shutdown:48:210 bind:49:200 listen:50:201 getsockname:51:204 getpeername:52:205
setsockopt:54:208 getsockopt:55:209 fork:57:- vfork:58:- execve:59:221 exit:60:93 wait4:61:260 kill:62:129
uname:63:160 fsync:74:82 fdatasync:75:83 truncate:76:45 ftruncate:77:46 getdents:78:-
getcwd:79:17 chdir:80:49 fchdir:81:50 rename:82:- mkdir:83:- rmdir:84:- creat:85:- link:86:- unlink:87:- symlink:88:-
readlink:89:- chmod:90:- fchmod:91:52 chown:92:- fchown:93:55 lchown:94:- umask:95:166 gettimeofday:96:169
getrlimit:97:163 getrusage:98:165 sysinfo:99:179 times:100:153 getuid:102:174 getgid:104:176 setuid:105:146
setgid:106:144 geteuid:107:175 getegid:108:177 setpgid:109:154 getppid:110:173 getpgrp:111:- setsid:112:157
setreuid:113:145 setregid:114:143 getgroups:115:158 setresuid:117:147 getresuid:118:148 setresgid:119:149
getresgid:120:150 getpgid:121:155 getsid:124:156 rt_sigpending:127:136 rt_sigtimedwait:128:137 rt_sigqueueinfo:129:138
rt_sigsuspend:130:133 sigaltstack:131:132 utime:132:- mknod:133:- statfs:137:43 fstatfs:138:44 getpriority:140:141
sched_getparam:143:121 sched_getscheduler:145:120 sched_get_priority_max:146:125 sched_get_priority_min:147:126
sched_rr_get_interval:148:127 mlock:149:228 munlock:150:229 arch_prctl:158:-
gettid:186:178 getxattr:191:8 lgetxattr:192:9 fgetxattr:193:10 listxattr:194:11 llistxattr:195:12
flistxattr:196:13 tkill:200:130 time:201:- futex:202:98 sched_getaffinity:204:123 epoll_create:213:- getdents64:217:61
set_tid_address:218:96 restart_syscall:219:128 timer_settime:223:110
timer_gettime:224:108 timer_getoverrun:225:109 timer_delete:226:111 clock_gettime:228:113 clock_getres:229:114
clock_nanosleep:230:115 exit_group:231:94 epoll_wait:232:- epoll_ctl:233:21 tgkill:234:131 utimes:235:- waitid:247:95
openat:257:56 mkdirat:258:34 mknodat:259:33
fchownat:260:54 futimesat:261:- newfstatat:262:79 unlinkat:263:35 renameat:264:38 linkat:265:37 symlinkat:266:36
readlinkat:267:78 fchmodat:268:53 faccessat:269:48 pselect6:270:72 ppoll:271:73 set_robust_list:273:99
get_robust_list:274:100 sync_file_range:277:84 utimensat:280:88 epoll_pwait:281:22 signalfd:282:-
timerfd_create:283:85 eventfd:284:- fallocate:285:47 timerfd_settime:286:86 timerfd_gettime:287:87 accept4:288:242
signalfd4:289:74 eventfd2:290:19 epoll_create1:291:20 dup3:292:24 pipe2:293:59 preadv:295:69
pwritev:296:70 recvmmsg:299:243 sendmmsg:307:269 getcpu:309:168 getrandom:318:278 execveat:322:281
copy_file_range:326:285 membarrier:324:283 statx:332:291 rseq:334:293 renameat2:316:276
pidfd_open:434:434 close_range:436:436 openat2:437:437 faccessat2:439:439 epoll_pwait2:441:441 futex_waitv:449:449
landlock_create_ruleset:444:444 landlock_restrict_self:446:446
"""

# By these, code that sees the same files could tell each other something, or one process wake another. Allowed where no
# agent's code runs: servers of tools lock their caches and watch their files.
FOR_TOOL_SERVERS = """
mincore:27:232 fcntl:72:25 flock:73:32 readahead:187:213 fadvise64:221:223 inotify_init:253:- inotify_add_watch:254:27
inotify_rm_watch:255:28 inotify_init1:294:26 preadv2:327:286 pwritev2:328:287 timer_create:222:107 madvise:28:233
prctl:157:167 setrlimit:160:164
"""

LOAD_WORD, JUMP_EQUAL, JUMP_GREATER_EQUAL, JUMP_ANY_BIT, RETURN = (0x20, 0x15, 0x35, 0x45, 0x06)
OFFSET_NUMBER, OFFSET_ARCHITECTURE, OFFSET_ARGUMENTS = 0, 4, 16

type Instruction = tuple[int, int, int, int]


def filter_program(machine: str | None = None, *, runs_agents_code: bool = True) -> bytes:
    """The BPF bytes for `bwrap --seccomp`. ValueError for a machine without a table of call numbers here.

    Without agents' code, as in the jail of a tool server, the calls for shared files are allowed too."""
    name = machine or platform.machine()
    if name not in AUDIT_ARCHITECTURES:
        raise ValueError(f"no seccomp table for {name}; known: {', '.join(AUDIT_ARCHITECTURES)}")
    instructions = [
        # The architecture first: a 32-bit process has other numbers for the same calls, and would pass the list below.
        (LOAD_WORD, 0, 0, OFFSET_ARCHITECTURE),
        (JUMP_EQUAL, 1, 0, AUDIT_ARCHITECTURES[name]),
        (RETURN, 0, 0, RETURN_KILL_PROCESS),
        (LOAD_WORD, 0, 0, OFFSET_NUMBER),
        # Before the judged ones, some of which are among them.
        *(step for number in numbers_in(FOR_TOOL_SERVERS, name) for step in allow(number) if not runs_agents_code),
        *judged_calls(list(AUDIT_ARCHITECTURES).index(name), runs_agents_code),
        *answer(TIMER_CREATE[list(AUDIT_ARCHITECTURES).index(name)], RETURN_ERRNO | errno.ENOSYS),
        *(step for number in allowed_numbers(name) for step in allow(number)),
        # What is left is refused. Numbers of the x32 ABI have bit 30 set, so they are refused here too.
        (JUMP_GREATER_EQUAL, 0, 1, FIRST_MODERN_NUMBER),
        (RETURN, 0, 0, RETURN_ERRNO | errno.ENOSYS),
        (RETURN, 0, 0, RETURN_ERRNO | errno.EPERM),
    ]
    return b"".join(struct.pack("<HBBI", *instruction) for instruction in instructions)


def allowed_numbers(machine: str) -> list[int]:
    """Numbers of the calls that are allowed with any arguments, in ascending order."""
    return numbers_in(ALLOWED, machine)


def numbers_in(table: str, machine: str) -> list[int]:
    column = list(AUDIT_ARCHITECTURES).index(machine) + 1
    cells = (entry.split(":")[column] for entry in table.split())
    return sorted(int(cell) for cell in cells if cell != "-")


def allow(number: int) -> list[Instruction]:
    return answer(number, RETURN_ALLOW)


def answer(number: int, verdict: int) -> list[Instruction]:
    # The two numbers after the opcode are how many instructions to skip if the comparison holds, and if it does not.
    return [(JUMP_EQUAL, 0, 1, number), (RETURN, 0, 0, verdict)]


def judged_calls(column: int, runs_agents_code: bool) -> list[Instruction]:
    """The calls that are allowed or refused by one of their arguments."""
    # Only the low 32 bits of an argument are compared: the kernel reads no more of these.
    number = {name: numbers[column] for name, numbers in JUDGED.items()}
    return [
        *judge(number["clone"], 0, refuse_any_bit(CLONE_NEW_FLAGS)),
        *judge(number["ioctl"], 1, [step for command in IOCTLS_REFUSED for step in refuse_equal(command)]),
        *judge(number["socket"], 0, refuse_unless_equal(ADDRESS_FAMILY_UNIX)),
        *judge(number["socketpair"], 0, refuse_unless_equal(ADDRESS_FAMILY_UNIX)),
        # Pid 0 is the calling process.
        *judge(
            number["prlimit64"], 0, [*refuse_unless_equal(0), *(refuse_new_core_limit() if runs_agents_code else [])]
        ),
        *judge(number["setrlimit"], 0, refuse_equal(RLIMIT_CORE)),
        *judge(number["prctl"], 0, [*refuse_equal(PR_SCHED_CORE), *refuse_equal(PR_SET_MEMORY_MERGE)]),
        *judge(number["fcntl"], 1, refuse_unless_in(FCNTLS_ALLOWED)),
        # RWF_NOWAIT tells which pages of a file are in memory.
        *judge(number["preadv2"], 5, refuse_unless_equal(0)),
        *judge(number["pwritev2"], 5, refuse_unless_equal(0)),
        *judge(number["madvise"], 2, refuse_equal(MADV_MERGEABLE)),
    ]


def judge(number: int, argument: int, refusals: list[Instruction]) -> list[Instruction]:
    """Instructions for the call `number`: load the argument, refuse or allow. For other calls they are skipped."""
    block = [(LOAD_WORD, 0, 0, OFFSET_ARGUMENTS + 8 * argument), *refusals, (RETURN, 0, 0, RETURN_ALLOW)]
    # Skipping the block leaves the call number in the accumulator for the comparisons that follow.
    return [(JUMP_EQUAL, 0, len(block), number), *block]


def refuse_new_core_limit() -> list[Instruction]:
    """prlimit64 with this resource and a pointer to a new limit; without one it only asks."""
    resource, new_limit = OFFSET_ARGUMENTS + 8, OFFSET_ARGUMENTS + 16
    return [
        (LOAD_WORD, 0, 0, resource),
        (JUMP_EQUAL, 0, 5, RLIMIT_CORE),
        (LOAD_WORD, 0, 0, new_limit),
        (JUMP_EQUAL, 0, 2, 0),
        (LOAD_WORD, 0, 0, new_limit + 4),
        (JUMP_EQUAL, 1, 0, 0),
        (RETURN, 0, 0, RETURN_ERRNO | errno.EPERM),
    ]


def refuse_any_bit(mask: int) -> list[Instruction]:
    return [(JUMP_ANY_BIT, 0, 1, mask), (RETURN, 0, 0, RETURN_ERRNO | errno.EPERM)]


def refuse_equal(value: int) -> list[Instruction]:
    return [(JUMP_EQUAL, 0, 1, value), (RETURN, 0, 0, RETURN_ERRNO | errno.EPERM)]


def refuse_unless_equal(value: int) -> list[Instruction]:
    return [(JUMP_EQUAL, 1, 0, value), (RETURN, 0, 0, RETURN_ERRNO | errno.EPERM)]


def refuse_unless_in(values: tuple[int, ...]) -> list[Instruction]:
    return [*(step for value in values for step in allow(value)), (RETURN, 0, 0, RETURN_ERRNO | errno.EPERM)]
