"""Settings of the consumer programs, one TOML section each. No heavy imports: a wrong field is reported at once."""

from typing import Literal

from msgspec import Struct, field

_CPU_ENVIRONMENT = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCHDYNAMO_DISABLE": "1"}


class VllmSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One vLLM server. TOML section [vllm]. The defaults are for a small model on shared CPU cores; deploy/config/gpu.toml
    has those for a GPU."""

    port: int = 8100
    "port on loopback; the server's name on the log is http://127.0.0.1:<port>"
    threads: int = 1
    "OpenMP threads of the model; one is best for a small model on shared cores; 0 = vLLM decides"
    tokens_max: int = 512
    "longest prompt and answer together"
    sequences_max: int = 64
    "requests sampled in one step"
    kv_cache_gibibytes: int = 1
    "memory for attention caches of a server on CPU, which would take nearly all of the machine otherwise; 0 on a GPU"
    gpu_memory_share: float = 0.0
    "of a GPU's memory, for weights and attention caches together (--gpu-memory-utilization); 0 = vLLM decides"
    tensor_parallel: int = 1
    "GPUs that the model is split over (--tensor-parallel-size)"
    eager: bool = True
    "true = no CUDA graphs and no compilation (--enforce-eager); what a CPU needs"
    executor: str = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
    """how the model is run (--distributed-executor-backend): by default inside the engine's process, which spares 28 % of the
    processor time of a token on CPU, where vLLM takes a process more; empty = vLLM decides, as it must for several GPUs"""
    environment: dict[str, str] = field(default_factory=lambda: dict(_CPU_ENVIRONMENT))
    """further variables of vLLM's environment. On shared cores the kernel places threads better than vLLM, and without the
    second one the first request compiles C++ for 17 s"""
    dtype: Literal["float32", "bfloat16", "float16", "auto"] = "float32"
    "float32 makes sampling agree with the trainer to 1e-5; others are for machines with a GPU"
    development_mode: bool = False
    """true = vLLM's development mode, in which anybody who reaches the port may call any method of its workers; false = only
    the endpoints that the reloader needs, as a plugin of vLLM"""
    start_seconds_max: float = 300.0
    "a server that is not healthy by then has failed"
    folder: str = ""
    "where the first weights are unpacked; empty: a temporary folder"
    arguments: tuple[str, ...] = ()
    "more arguments for `vllm serve`, as they are"


class ReloaderSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The program that brings weights to vLLM servers. TOML section [reloader]."""

    servers: tuple[str, ...] = ("http://127.0.0.1:8100",)
    "addresses of the servers; each is also the server's name on the log"
    probe_tolerance: float = 1e-3
    "greatest difference allowed between the server's and the trainer's log-probabilities of the probe"
    pause_mode: Literal["wait", "abort", "keep"] = "wait"
    """what happens to running turns: wait = they end on the old weights, so each has one version; abort = they are lost;
    keep = they stop in the middle and go on with the new weights, each token with the version that sampled it"""
    pause_seconds_max: float = 60.0
    "a server that cannot pause within this is reported and tried again"
    request_seconds_max: float = 60.0
    "longest wait for any other response of a server"
    poll_seconds: float = 1.0
    "how often a server is asked what it serves, so that a restarted one is noticed"
    retry_seconds: float = 1.0
    "wait after the first failure; doubles with each further one"
    retry_seconds_max: float = 30.0
    "longest wait between tries"
    skipped_versions_max: int = 8
    "versions that were skipped are loaded and verified on the way to the newest, at most so many at once"
    folders_kept: int = 3
    "unpacked weight versions kept on disk per server"
    folder: str = ""
    "where weights are unpacked, readable by the servers; empty: a temporary folder"


class TracesSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The program that keeps the trace store and serves SQL and the web page. TOML section [traces].

    There is one for the whole field. With follow = false it needs no log: it opens the existing store and serves all
    requests but `finish` and `reconcile`, which compare with the log. No other process may open a chdb store meanwhile.
    """

    dsn: str = "chdb:///tmp/replayground-traces"
    "chdb:///folder for ClickHouse in this process, or clickhouse://user:password@host:port/database for a server"
    database: str = "replayground"
    "name of the database; created if it does not exist"
    port: int = 8200
    "port of the web page and the SQL interface"
    bind: str = "127.0.0.1"
    """address that page, SQL interface, /healthz and /metrics listen on. On anything but loopback page and SQL ask for a
    token (`replayground tokens`); /healthz and /metrics do not"""
    name: str = ""
    "host name in the addresses of the page, as its certificate has it; empty: bind"
    tokens: str = ""
    "file with the hashes of tokens; empty: tokens.json in the folder of the field"
    tls_certificate: str = ""
    "file with the certificate chain (PEM); empty: no TLS"
    tls_key: str = ""
    "file with the key of the certificate (PEM)"
    follow: bool = True
    "false = do not read the log: serve page and SQL from the store as it is, while the rest of the field is down"
    batch_rows_max: int = 10_000
    "rows inserted at once at most"
    batch_bytes_max: int = 16 * 1024 * 1024
    "a batch of rows of this size is inserted at once; with batch_rows_max it bounds the memory of the program"
    flush_seconds: float = 1.0
    "a row waits no longer than this for others to be inserted with, half of it once there are 200"
    sql_seconds_max: float = 20.0
    "time limit of a SQL statement of a user"
    sql_rows_max: int = 10_000
    "most rows that a SQL statement of a user returns"
    sql_memory_bytes_max: int = 1_000_000_000
    "memory limit of a SQL statement of a user"
    sql_dsn: str = ""
    """where dsn is a server: the user that SQL of people runs as, clickhouse://user:password@host:port
    (deploy/clickhouse/people.sql makes it); empty: it is refused"""
    sql_bytes_max: int = 64 * 1024 * 1024
    "largest result of a SQL statement of a user, as JSON"
    sql_processes: int = 2
    "statements of users that run at the same time, each in a process of its own"
    sql_waiting_max: int = 32
    "statements of users that run or wait; further ones are refused, and one person has a quarter of them at most"
    sql_per_minute_max: int = 600
    "statements that one person may send in a minute"
    webhook: str = ""
    """env:NAME or file:PATH with the http or https address that changes of alerts are posted to as JSON; empty: none.
    Whoever sets alerts on the page cannot choose where they go"""
    threads: int = 1
    "threads of ClickHouse for one query; the cores are shared with sampling and training"
