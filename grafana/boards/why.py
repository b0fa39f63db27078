"""Why did it not speculate? Reasons of requests, gates, probes, and the load signals of the gates."""

from .panels import Dashboard, Panel, Query, lines, stat, timeline
from .promql import increase, of, rate, share

REQUESTS, TOKENS, GATE, LOAD, MODE = (
    "foretell_requests_total",
    "foretell_output_tokens_total",
    "foretell_gate_open",
    "foretell_replica_load",
    "foretell_mode",
)
# A speculated request has a reason if it was decoded plainly to its end after some rounds.
ELIGIBLE, PASSTHROUGH, WITH_REASON = 'path=~"plain|speculated"', 'path="passthrough"', 'reason!=""'
RUNNING_OR_WAITING, KV = 'signal=~"running|waiting"', 'signal="kv"'
NOT_ONE = ((None, "green"), (1, "red"))
MODES = {0: ("off", "red"), 1: ("observe", "yellow"), 2: ("auto", "green")}
OPEN = {0: ("closed", "red"), 1: ("open", "green")}


def mode_number() -> str:
    """0 off, 1 observe, 2 auto; the lowest over several processes."""
    auto, observe = of(MODE, 'mode="auto"'), of(MODE, 'mode="observe"')
    return f"min by (backend) (2 * {auto} + ignoring (mode) {observe})"


def state() -> tuple[Panel, ...]:
    """The row “Now”."""
    return (
        stat(
            "Mode",
            "none",
            Query(mode_number(), "{{backend}}"),
            states=MODES,
            absent="not scraped",
            width=6,
            says="The mode in force at each backend; with several processes the most restrictive.",
            good="`auto`, once `observe` has shown a gain.",
            otherwise="`off` and `observe` never speculate: set the mode on the status page or with `POST /api/mode`.",
        ),
        stat(
            "Gates closed now",
            "none",
            Query(f"count({of(GATE)} == 0) or 0 * count({of(GATE)})"),
            steps=((None, "green"), (1, "yellow")),
            absent="no gates yet",
            width=6,
            says="Number of closed gates, over policies, replicas and processes.",
            good="0; during peaks of load some are closed, as intended.",
            otherwise="find the gate in the timeline below, and look at the panel of its signal.",
        ),
        stat(
            "Token ids in doubt",
            "none",
            Query(increase("foretell_shadow_mismatch_total", by="field"), "{{field}}"),
            steps=NOT_ONE,
            width=6,
            says=(
                "Requests within the time range whose token ids were found in doubt, in the prompt or in the output; "
                "they are decoded plainly to the end."
            ),
            good="0, or a few per thousand requests.",
            otherwise=(
                "many: Foretell's tokenizer differs from the engine's; check `tokenizer` of the backend in the process "
                "file and run `foretell check`."
            ),
        ),
        stat(
            "Tokenizer mismatch",
            "none",
            Query(f"max by (drafter) ({of('foretell_tokenizer_mismatch')})", "{{drafter}}"),
            states={0: ("none", "green"), 1: ("mismatch", "red")},
            absent="no model drafter",
            width=6,
            says=(
                "Model drafters that are declared to share the target's vocabulary and do not. A drafter with a "
                "mismatch does not draft."
            ),
            good="none.",
            otherwise="set `vocabulary` of the drafter to `auto`, or export a drafter with the target's tokenizer.",
        ),
    )


def reasons() -> tuple[Panel, ...]:
    """The row “Reasons”."""
    return (
        lines(
            "Output tokens by path and reason",
            "percentunit",
            Query(f"{share(TOKENS, 'path, reason')} > 0", "{{path}} {{reason}}"),
            stack=True,
            width=24,
            height=10,
            defaults={"min": 0, "max": 1},
            says=(
                "Share of output tokens by path and reason, passthrough answers included; those of answers without usage "
                "are estimated. `/api/coverage` also has route, policy and backend."
            ),
            good="mostly `speculated` and `plain`: these are eligible.",
            otherwise="the largest `passthrough` reason is what limits the gain: its meaning is in the panel below.",
        ),
        lines(
            "Eligible requests decoded plainly",
            "reqps",
            Query(f"{rate(REQUESTS, ELIGIBLE, WITH_REASON, by='reason')} > 0", "{{reason}}"),
            stack=True,
            width=12,
            height=10,
            says="Eligible requests per second that were decoded plainly, or plainly to their end, by reason.",
            good="mostly `control_group` and `no_gain`.",
            otherwise=(
                "`gate_*`: see the timeline below. `max_gap`: even the shortest round would exceed `gates.max_gap`. "
                "`draft_fault`: a drafter failed. `no_gain`, `no_draft`: see “how good are the drafts?”. `observe`, `shadow`, "
                "`policy`: set by the mode or the policy. `budget`: rejected drafts took 2 % of the time next to "
                "others' requests. `backend_speculates`: the engine speculates itself."
            ),
        ),
        lines(
            "Passthrough requests",
            "reqps",
            Query(f"{rate(REQUESTS, PASSTHROUGH, by='reason')} > 0", "{{reason}}"),
            stack=True,
            width=12,
            height=10,
            says=(
                "Requests per second that are never speculated on, by reason. They have no policy, so they are absent "
                "if the variable *Policy* selects one."
            ),
            good="only features that your clients use: `tools`, `structured`, `multimodal`; `route`: not a completion.",
            otherwise=(
                "`no_policy`: no policy matches. `parameter`, `unknown_parameter`, `defaults_unknown`: the guarantees "
                "page names the parameters. `tokenizer`, `no_verify_method`, `unreachable`, `several_engines`: Foretell "
                "cannot verify at this backend; run `foretell probe`. `memory`, `sessions`: raise `limits`."
            ),
        ),
        lines(
            "Share of requests by path",
            "percentunit",
            Query(share(REQUESTS, "path"), "{{path}}"),
            stack=True,
            width=12,
            defaults={"min": 0, "max": 1},
            says="Share of requests by path: `speculated`, `plain` (eligible, decoded plainly) or `passthrough`.",
            good="mostly `speculated` once the mode is `auto`.",
            otherwise="see the reasons in the two panels above.",
        ),
        timeline(
            "Mode over time",
            Query(mode_number(), "{{backend}}"),
            states=MODES,
            absent="not scraped",
            width=12,
            says="The mode in force at each backend; with several processes the most restrictive.",
            good="`auto`, and changes only by an operator.",
            otherwise=(
                "unexpected change: the log has the origin of each; modes set with a `ttl` expire by themselves."
            ),
        ),
    )


def gates() -> tuple[Panel, ...]:
    """The row “Gates”."""
    return (
        timeline(
            "Gates",
            Query(f"min by (policy, replica, gate) ({of(GATE)})", "{{policy}} {{replica}} {{gate}}"),
            states=OPEN,
            absent="no gates yet",
            width=24,
            height=12,
            says="Live reasons for plain decoding, by policy and replica; shown closed if closed in any process.",
            good="open (green).",
            otherwise=(
                "`load`: the engine has requests waiting or its cache is full; the gate reopens by itself. `stale`: "
                "its metrics cannot be read. `acceptance`: too few drafted tokens are accepted. `control`: the control "
                "group was faster, or recent speculation cost more than it saved. `first_token`: more drafts would delay first tokens. "
                "`memory`: Foretell has reached `limits.memory`. `health`: the replica is down."
            ),
        ),
        lines(
            "Gate transitions",
            "cps",
            Query(rate("foretell_gate_transitions_total", by="gate, to"), "{{gate}} {{to}}"),
            width=12,
            absent="not scraped",
            says="Transitions of gates per second, checked every second.",
            good="rare.",
            otherwise=(
                "many per minute: a signal oscillates around its threshold; raise `gates.waiting` or `gates.kv`, or "
                "lengthen `gates.reprobe`."
            ),
        ),
        lines(
            "Probes",
            "short",
            Query(
                increase("foretell_probe_total", by="replica, result", over="$__rate_interval"),
                "{{replica}} {{result}}",
            ),
            width=12,
            absent="no probe",
            says=(
                "Completed measurements of a replica's verify requests: they pay (`pays`), nothing pays (`pays_not`), "
                "or several engines answer (`several_engines`)."
            ),
            good="one `pays` per replica after its start.",
            otherwise=(
                "`pays_not`: see the sizing page. `several_engines`: configure the engines one by one, or by headless DNS, "
                "instead of a load balancer."
            ),
        ),
    )


def load() -> tuple[Panel, ...]:
    """The row “Load of the engines”."""
    return (
        lines(
            "Requests at the engine",
            "short",
            Query(f"max by (replica, signal) ({of(LOAD, RUNNING_OR_WAITING)})", "{{replica}} {{signal}}"),
            absent="no load signal",
            says="Requests running and waiting, as the engine reports them.",
            good="`waiting` at 0: the default gate closes above it.",
            otherwise="`waiting` always above 0: the engine is full and speculation cannot help; add replicas.",
        ),
        lines(
            "Engine's cache in use",
            "percentunit",
            Query(f"max by (replica) ({of(LOAD, KV)})", "{{replica}}"),
            steps=((None, "green"), (0.9, "red")),
            absent="no load signal",
            defaults={"min": 0, "max": 1},
            says="Share of the engine's KV cache in use.",
            good="below 90 %: the default gate closes above it.",
            otherwise="always above: the engine is at its limit; add replicas or shorten contexts.",
        ),
        lines(
            "Age of the load signal",
            "s",
            Query(f"max by (replica) ({of('foretell_replica_load_age_seconds')})", "{{replica}}"),
            steps=((None, "green"), (2, "red")),
            absent="no load signal",
            says="Age of the engine's last load report.",
            good="below 2 s: the default gate `stale` closes above it.",
            otherwise="the engine's metrics page is slow or cannot be read: check `load.url` of the backend.",
        ),
    )


def board() -> Dashboard:
    """The dashboard."""
    return Dashboard(
        "why",
        "why did it not speculate?",
        "Reasons of plain and passthrough requests, gates and modes over time, and the signals of the gates.",
        (("Now", state()), ("Reasons", reasons()), ("Gates", gates()), ("Load of the engines", load())),
    )
