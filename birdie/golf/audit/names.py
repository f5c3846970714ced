"""How scripts call things: where validation tokens come from, what is a loss, what exports, what calibrates.

The scan follows data, but data must come from somewhere and go somewhere, and those ends are known by name.
"""

import re


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


VALIDATION = re.compile(
    r"^(?:(?:my|all|local|full|raw|global|sp|self)_)?(?:val|valid|validation|heldout|held_out|eval)_"
    r"(?:tokens?|toks?|ids|data|stream|seqs?|docs?|inputs|targets|x|y|batch|batches|loader|iter|shards?|files?|paths?|"
    r"glob|pattern|bin|text|set|dataset|split)$",
    re.IGNORECASE,
)
LOADS_VALIDATION = re.compile(
    r"^_?(?:load|get|read|make|build|open|fetch)_(?:\w+_)?(?:val|valid|validation|heldout)(?:_|$)", re.IGNORECASE
)
NOT_TOKENS = re.compile(r"loss|bpb|score|metric|step|every|interval|size|count|len|freq|name", re.IGNORECASE)
LOADS = re.compile(r"load|read|open|fetch|token|data|stream|shard", re.IGNORECASE)
VALIDATION_FILE = re.compile(r"(?:^|[/_\-.*])(?:val|valid|validation)(?:[_\-.*/]|$)", re.IGNORECASE)
TRAINING_FILE = re.compile(r"(?:^|[/_\-.*])train(?:ing)?(?:[_\-.*/]|$)", re.IGNORECASE)
FILE = re.compile(r"[/*]|\.(?:bin|npy|npz|pt|txt|json|jsonl|dat)\b")
TRAINING = re.compile(r"^(?:\w+_)?train_(?:files?|paths?|glob|pattern|shards?|bin)$", re.IGNORECASE)

TARGETS = _words(
    "y tgt tgts target targets y_batch yb y_b labels label truth gold actual nxt next_token next_tok y_row tgt_ids"
)
TOKENS = _words("tok token t sym symbol byte")
"""Names under which a loop over a stream has the token that is being scored."""

FINAL = re.compile(r"bpb|bits_per_byte|val_loss|valid_loss|final_(?:loss|nll|score)", re.IGNORECASE)
SCORES = re.compile(r"^_?(?:eval|score|valid|test_|measure|final)|bpb|bits_per", re.IGNORECASE)
EVALUATES = re.compile(r"eval|score|bpb|predict|inference|(?:^|_)validat(?:e|ion)(?:_(?:loss|model))?$", re.IGNORECASE)
RUNS = re.compile(r"(?:^|_)(?:train|run|main)", re.IGNORECASE)
"""Functions that evaluate besides what else they do: train_and_eval."""
LOSS = re.compile(r"cross_?entropy|nll|xent|(?:^|_)ce(?:_|$)|loss_fn|criterion", re.IGNORECASE)
LOGARITHMS = _words("log log2 log1p log10 log_softmax logsumexp logaddexp log_sigmoid")
EXPONENTIALS = _words("exp exp2 expm1 logaddexp logsumexp softmax")
EXPORTS = re.compile(
    r"^_?(?:serialize|serialise|quantize|quantise|export|pack|compress|gptq|dump|savez?|save_\w+|quantize_\w+|"
    r"quantise_\w+|mixed_quant\w*|gptq_\w+|compress_\w+|export_\w+|serialize_\w+|pack_\w+)$",
    re.IGNORECASE,
)
CALIBRATES = re.compile(r"hessian|calib|(?:^|_)gptq|(?:^|_)awq|smooth_?quant|act_scales|fisher", re.IGNORECASE)
WARMS = re.compile(r"warm_?up|warm_|(?:^|_)prime|precompile|compile_", re.IGNORECASE)
HOOKS = frozenset(("register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook"))
RESTORES = frozenset(("decompress", "dequantize_state_dict", "deserialize"))
RESERVES = re.compile(r"reserve|kept_back|head_?room", re.IGNORECASE)
LEARNS = _words("update observe learn fit partial_fit train_on absorb add_tokens ingest")
CLOCKS = _words("time perf_counter monotonic perf_counter_ns monotonic_ns time_ns elapsed_time process_time")
NETWORK = _words(
    "urlopen urlretrieve create_connection HTTPConnection HTTPSConnection hf_hub_download snapshot_download "
    "load_dataset"
)
NETWORK_MODULES = _words("requests httpx aiohttp urllib3 socket ftplib")
READS = re.compile(r"^(?:open|fromfile|memmap|load|read_bytes|read_text|from_file|load_\w*shard\w*|read_\w*shard\w*)$")

SIZES = _words("len numel size dim ndim isinstance hasattr type id stride element_size nelement")
SHAPES = _words("shape dtype device ndim nbytes itemsize is_cuda training")
FRESH = _words(
    "zeros_like ones_like empty_like full_like rand_like randn_like randint_like manual_seed zeros ones empty full "
    "rand randn randint nonzero flatnonzero argwhere"
)
"""Calls whose result has nothing of what they are given but its shape, or where something is."""
STATISTICS = _words("bincount Counter unique histc histogram")
SEARCHES = _words("minimize minimize_scalar fminbound brent golden brute differential_evolution")
"""Calls that look for the argument of the least value of a function."""
MAPS = _words("map starmap imap imap_unordered pmap")
HELPERS = MAPS | _words("submit apply apply_async run_in_executor checkpoint")
"""Calls that call what they are given first, on the rest of it or on each of that."""
ALIASES = _words(
    "to cuda cpu bfloat16 float half double eval train requires_grad_ compile detach view reshape flatten transpose "
    "contiguous squeeze unsqueeze expand parameters named_parameters modules named_modules children buffers "
    "state_dict values items keys get list tuple set filter iter enumerate zip sorted reversed chain islice tqdm "
    "long int item numpy astype copy tolist partial DistributedDataParallel DDP from_numpy tensor as_tensor asarray "
    "array pin_memory ravel type next deque"
)
"""Calls that give back what they are given, as far as learning goes."""
CASTS = _words(
    "to cpu cuda long int item numpy astype reshape view flatten ravel squeeze unsqueeze contiguous tolist detach "
    "tensor as_tensor asarray array from_numpy float clone copy"
)
PURE = _words("len int float round abs min max sum ceil floor numel size dim")
"""Calls that give the same number of the same arguments."""
DRAWS = _words("pop popleft next choice choices sample islice")
"""Calls that give a part of what they are given, and nobody knows which."""
TEXTS = _words("lower upper strip casefold")
PICKS = _words("gather take take_along_dim take_along_axis index_select")
HOLDS = _words("params model module optimizer optimizers")
"""Arguments by name that what is made from them holds on to; of the others, the first."""
GROWS = _words("append extend add appendleft insert put push setdefault")
RANKS = {"rank": 0, "local_rank": 0, "world_size": 1}
"""What ranks do together is what one would do alone."""
PATHS = _words(
    "Path PurePath str join glob iglob rglob sorted list tuple iter format expanduser resolve get getenv fspath"
)
"""Calls that make a path of a path."""
ADDS = _words("add_ sub_ addcmul_ addcdiv_ lerp_ addmm_ addr_ baddbmm_")
PLACES = _words("scatter_add_ index_add_ index_put_ scatter_ scatter_reduce_ put_ index_fill_ at")


def validation(name: str) -> bool:
    """Whether a variable, a parameter or an attribute of this name holds validation tokens, or the way to them."""
    return bool(VALIDATION.match(name))


def loads_validation(name: str) -> bool:
    """Whether a function of this name gives validation tokens."""
    return bool(LOADS_VALIDATION.match(name)) and not NOT_TOKENS.search(name)
