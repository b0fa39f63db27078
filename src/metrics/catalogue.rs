//! The list itself, in sections by the question that a metric answers.

use crate::{Counter, Gauge, Histogram, Metric, MetricEntry, Section};

/// Seconds of work in Foretell itself.
const WORK: &[f64] = &[5e-6, 1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1];
/// Seconds to the first token: the buckets of OpenTelemetry's conventions for generative AI.
const FIRST: &[f64] =
    &[0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0];
/// Seconds per token: the buckets of the conventions, and finer ones below.
const PER_TOKEN: &[f64] =
    &[0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5];
/// Seconds of a request.
const REQUEST: &[f64] = &[0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0];
/// Seconds of a verify request.
const CALL: &[f64] = &[1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.5];
/// Seconds to connect.
const CONNECT: &[f64] = &[1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 0.01, 0.05, 0.25, 1.0, 2.5];
/// Seconds of a run of the ONNX target's model.
const STEP: &[f64] =
    &[0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.256, 0.512, 1.024, 2.048, 4.096];
/// Draft tokens of a round.
const TOKENS: &[f64] = &[0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 32.0];

/// Declares the metrics of all sections, and the list of the sections.
macro_rules! sections {
    ($($title:literal { $($kind:ident $name:ident = $metric:literal [$($label:literal),*] $(in $buckets:ident)? $help:literal;)* })*) => {
        $($(sections!(@ $kind $name $metric [$($label),*] $($buckets)? $help);)*)*

        /// Every section of the reference, in its order.
        pub const SECTIONS: &[Section] =
            &[$(Section { title: $title, entries: || vec![$(MetricEntry::from($name)),*] }),*];
    };
    (@ histogram $name:ident $metric:literal [$($label:literal),*] $buckets:ident $help:literal) => {
        #[doc = $help]
        pub const $name: Histogram =
            Histogram { metric: Metric { name: $metric, labels: &[$($label),*], help: $help }, buckets: $buckets };
    };
    (@ counter $name:ident $metric:literal [$($label:literal),*] $help:literal) => {
        #[doc = $help]
        pub const $name: Counter = Counter(Metric { name: $metric, labels: &[$($label),*], help: $help });
    };
    (@ gauge $name:ident $metric:literal [$($label:literal),*] $help:literal) => {
        #[doc = $help]
        pub const $name: Gauge = Gauge(Metric { name: $metric, labels: &[$($label),*], help: $help });
    };
}

sections! {
    "Requests" {
        counter REQUESTS = "foretell_requests_total" ["model", "route", "policy", "path", "reason", "code_class"]
            "Finished requests; `reason` is why one was not speculated on, or not to its end.";
        gauge IN_FLIGHT = "foretell_requests_in_flight" [] "Requests being answered.";
        gauge STREAMS = "foretell_streams_in_flight" [] "Event streams being sent.";
        counter DISCONNECTS = "foretell_client_disconnects_total" [] "Clients that disconnected before the end of their answer.";
        counter BROKEN = "foretell_broken_answers_total" []
            "Answers that broke off after their head was sent, for a fault that was not the client's.";
        histogram TTFT = "foretell_time_to_first_token_seconds" ["path"] in FIRST
            "Time from accepting a completion to the first byte of its answer's body; vLLM's name.";
        histogram INTER_TOKEN_LATENCY = "foretell_inter_token_latency_seconds" ["path"] in PER_TOKEN
            "Time between two pieces of output of a streamed answer, as its client gets them; vLLM's name.";
        histogram E2E_LATENCY = "foretell_e2e_request_latency_seconds" ["path"] in REQUEST
            "Time from accepting a completion to the end of its answer; vLLM's name.";
        histogram TIME_TO_FIRST_TOKEN = "gen_ai_server_time_to_first_token_seconds" ["path"] in FIRST
            "Time from accepting a request to the first byte of its answer's body.";
        histogram TIME_PER_TOKEN = "gen_ai_server_time_per_output_token_seconds" ["path"] in PER_TOKEN
            "Time per output token after the first.";
        histogram REQUEST_DURATION = "gen_ai_server_request_duration_seconds" ["path"] in REQUEST
            "Time from accepting a request to the end of its answer.";
        counter OUTPUT_TOKENS = "foretell_output_tokens_total" ["path", "reason", "route"]
            "Output tokens of requests for text, by any API. Those of passthrough answers are as reported in their usage, else estimated: an event each, or a quarter of the bytes.";
        gauge CONNECTIONS = "foretell_connections" [] "Clients that are connected.";
        gauge CONNECTIONS_LIMIT = "foretell_connections_limit" [] "Clients that may be connected.";
        counter CONNECTIONS_EVICTED = "foretell_connections_evicted_total" []
            "Idle connections that were closed because others waited for one.";
        counter CONNECTIONS_FAILED = "foretell_connections_failed_total" [] "Connections that could not be accepted.";
        counter REFUSED = "foretell_requests_refused_total" ["code"] "Requests that were refused because of their head.";
    }
    "Is it helping" {
        gauge CONTROL_GROUP_RATIO = "foretell_control_group_ratio" ["policy", "backend", "bound"]
            "Time per token of eligible requests, divided by that of the control group. Below 1 speculation is faster.";
        gauge PROJECTED_SPEEDUP = "foretell_projected_speedup" ["policy", "backend", "bound", "basis"]
            "Projected speedup of requests that were decoded plainly, from drafts made in the shadow: plain time divided by projected time.";
        counter CONTROL_GROUP_REQUESTS = "foretell_control_group_requests_total" ["policy"] "Eligible requests in the control group, which is decoded plainly.";
        counter SAVED = "foretell_saved_seconds_total" ["policy"]
            "Time that rounds saved against plain decoding at the measured pace, rounds that saved time only, in seconds of answers.";
        counter WASTED = "foretell_wasted_seconds_total" ["policy"]
            "Time that rounds and switches lost against plain decoding at the measured pace, those that lost time only, in seconds of answers.";
        counter EXTRA_TOKENS = "foretell_extra_prefill_tokens_total" ["backend", "source"]
            "Tokens that the engine computed for verify requests beyond those that became output: `reported` by it, or `estimated` where it does not report them (draft tokens minus accepted ones).";
        counter VERIFY_CALLS = "foretell_verify_requests_total" ["backend", "method"]
            "Verify requests sent to engines. Engines show them in their logs and counters, in addition to those of clients (`fan_out` makes one prompt per draft position).";
    }
    "Speculation" {
        counter NUM_DRAFTS = "foretell_spec_decode_num_drafts_total" ["policy", "drafter", "prompt_bucket"] "Rounds whose verification result decided at least one token.";
        counter DRAFT_TOKENS = "foretell_spec_decode_num_draft_tokens_total" ["policy", "drafter", "prompt_bucket"] "Tokens drafted in these rounds.";
        counter ACCEPTED_TOKENS = "foretell_spec_decode_num_accepted_tokens_total" ["policy", "drafter", "prompt_bucket"] "Drafted tokens that became output.";
        counter ACCEPTED_PER_POSITION = "foretell_spec_decode_num_accepted_tokens_per_pos_total" ["drafter", "position"]
            "Drafted tokens that became output, by position in the draft.";
        counter DRAFTED_PER_POSITION = "foretell_spec_decode_num_draft_tokens_per_pos_total" ["drafter", "position"]
            "Rounds whose draft reached this position, the divisor for accepted tokens.";
        histogram VERIFY_SECONDS = "foretell_verify_seconds" [] in CALL "Duration of a verify request.";
        histogram DRAFT_SECONDS = "foretell_draft_seconds" [] in WORK "Time to draft for a round.";
        histogram GAMMA = "foretell_gamma" ["temperature", "load"] in TOKENS
            "Draft tokens sent in one round, by range of the request's temperature and of the engine's load (0 idle, 1 full or waiting).";
        histogram ACCEPTED = "foretell_accepted" ["temperature", "load"] in TOKENS
            "Draft tokens accepted in one round, by the same ranges.";
        gauge TOLERANCE = "foretell_tolerance" ["policy"]
            "Tolerance of the acceptance rule at the last round, 0 (exact) to 1.";
        gauge LOAD = "foretell_load" ["backend"] "Load of the engine at the last round, 0 to 1, by which the curves of policies are looked up.";
        counter DRAFTS = "foretell_drafts_total" ["kind"] "Requests to model drafters: a `draft`, or a `shadow` draft.";
        counter DRAFTS_LOST = "foretell_drafts_lost_total" ["kind", "cause"]
            "Requests to model drafters without an answer, or with one that came too late: `timeout`, `patience`, `fault`, `no_slot`.";
        counter DRIFT_TV = "foretell_drift_tv_total" ["policy"]
            "Drift of outputs, in total variation. Per output, its mean bounds how far their distribution is from the target's. Stays 0 by the exact rule.";
        counter SUBSTITUTIONS = "foretell_drift_substitutions_total" ["policy"] "Tokens that the target had not chosen.";
        counter DRIFT_POSITIONS = "foretell_drift_positions_total" ["outcome"]
            "Positions with a draft token under a lossy rule: `relaxed`, or exact because probabilities are `unknown` or a limit of drift is reached (`limited`).";
    }
    "Drafts inside the engine's steps (only with `drafts.listen`)" {
        gauge INJECT_ENGINES = "foretell_inject_engines" [] "Engines that are connected to the drafts service.";
        gauge INJECT_ROWS = "foretell_inject_rows" [] "Rows of their last steps.";
        counter INJECT_STEPS = "foretell_inject_steps_total" ["result"]
            "Steps of engines: `drafted`, `plain` without a draft, or `skipped` by the plug-in.";
        counter INJECT_DRAFTED = "foretell_inject_draft_tokens_per_pos_total" ["position"]
            "Draft tokens that engines verified inside their steps, by position in the draft.";
        counter INJECT_ACCEPTED = "foretell_inject_accepted_tokens_per_pos_total" ["position"]
            "Those that they accepted.";
        counter INJECT_LATE = "foretell_inject_late_total" [] "Answers after the plug-in's deadline; the step went without drafts.";
        counter INJECT_WAITED = "foretell_inject_waited_seconds_total" [] "Time that engines waited for drafts.";
        counter INJECT_SAVED = "foretell_inject_saved_seconds_total" [] "Time that drafts saved, of steps that saved time.";
        counter INJECT_WASTED = "foretell_inject_wasted_seconds_total" [] "Time that drafts lost, of steps that lost time, and waits for answers.";
    }
    "Why a request was not speculated on" {
        gauge GATE_OPEN = "foretell_gate_open" ["policy", "replica", "gate"] "1 where the gate allows speculation, 0 where it is closed.";
        gauge NOTHING_ELIGIBLE = "foretell_nothing_eligible" []
            "1 after a minute of traffic of which no output was eligible for speculation, until some is; the log and the status page name the cause and the remedy.";
        counter GATE_TRANSITIONS = "foretell_gate_transitions_total" ["gate", "to"] "Transitions of gates, checked every second.";
        counter PROBES = "foretell_probe_total" ["replica", "result"]
            "Measurements of a replica's verify requests that ended: they `pay`, nothing `pays_not`, or several engines answer (`several_engines`).";
        counter MISMATCHES = "foretell_shadow_mismatch_total" ["field"]
            "Requests whose token ids were found in doubt, so that they are decoded plainly to the end: in the `prompt`, or in the `output`; or whose output is parsed in another way by the backend (`parser`).";
        gauge TOKENIZER_MISMATCH = "foretell_tokenizer_mismatch" ["drafter"]
            "1 where a model drafter that is declared to share the target's vocabulary does not; it does not draft then.";
        gauge MODE = "foretell_mode" ["backend", "mode"] "1 for the mode in force, 0 for the others.";
    }
    "Replicas" {
        gauge REPLICA_UP = "foretell_replica_up" ["replica"] "1 where the last request, or health check, reached it, and it answers.";
        gauge REPLICA_SILENT = "foretell_replica_silent" ["replica"] "1 where it refuses no connection and answers nothing: two questions in a row, and no byte of any request.";
        gauge REPLICA_UNREADABLE = "foretell_replica_answers_unreadable" ["replica", "route"]
            "1 while requests of the route are passed through, because answers to first calls could not be read.";
        gauge BREAKER_STATE = "foretell_replica_breaker_state" ["replica"] "0 closed, 1 half open, 2 open.";
        counter BREAKER_TRANSITIONS = "foretell_replica_breaker_transitions_total" ["replica", "to"] "Changes of the breaker.";
        counter REPLICA_REQUESTS = "foretell_replica_requests_total" ["replica"] "Requests to it, those of Foretell included.";
        gauge REPLICA_IN_FLIGHT = "foretell_replica_requests_in_flight" ["replica"] "Requests in flight.";
        counter REPLICA_ERRORS = "foretell_replica_errors_total" ["replica", "kind"]
            "Requests without a complete answer, or with a server error that the request did not cause.";
        counter REPLICA_RETRIES = "foretell_replica_retries_total" ["replica", "result"]
            "Requests that got no byte from it and were retried (`sent`), or were not for want of budget (`no_budget`).";
        gauge REPLICA_LOAD = "foretell_replica_load" ["replica", "signal"]
            "Load as its engine reports it: requests `running` and `waiting`, share of its `kv` cache in use.";
        gauge REPLICA_LOAD_AGE = "foretell_replica_load_age_seconds" ["replica"] "Age of its engine's last load report.";
        histogram REPLICA_CONNECT = "foretell_replica_connect_seconds" ["replica"] in CONNECT "Time to connect to a replica, TLS included.";
    }
    "Fleet store (only with `fleet.store`)" {
        gauge STORE_UP = "foretell_store_up" [] "1 where the last exchange with the store succeeded.";
        gauge STORE_AGE = "foretell_store_age_seconds" []
            "Time since the measurements of other sidecars were last read; before the first time, since the start.";
        gauge STORE_SIDECARS = "foretell_store_sidecars" [] "Other sidecars whose measurements were read the last time.";
        counter STORE_ERRORS = "foretell_store_errors_total" ["kind"]
            "Exchanges that failed: no connection (`connect`), no answer in time (`timeout`), login refused (`password`), no free memory (`full`), another refusal (`refused`), unreadable `answer`; or that found sidecars of another `version`.";
    }
    "Is the proxy healthy" {
        histogram OVERHEAD = "foretell_overhead_seconds" ["stage"] in WORK
            "Foretell's work by stage: `parse` a request, `decide` by policies, `draft` (one event through the session: lookups, choice, acceptance, text), `stream` (one piece of output to the client's form).";
        histogram ADDED_TTFT = "foretell_added_ttft_seconds" [] in WORK
            "What Foretell adds to the time to the first token: from the complete request to its first upstream request, and from the first byte of the answer to the first byte sent.";
        gauge DRAFTER_QUEUE = "foretell_drafter_queue" ["drafter"] "Requests that wait for a model drafter.";
        gauge MEMORY = "foretell_memory_bytes" [] "Memory in use for bodies and sessions.";
        gauge MEMORY_LIMIT = "foretell_memory_limit_bytes" [] "Limit of that memory, limits.memory.";
        gauge DRAFTER_TRAINED = "foretell_drafter_trained_timestamp_seconds" ["drafter"]
            "When a loaded drafter was trained on recorded requests, Unix time; absent for other drafters.";
        gauge CORPUS_BYTES = "foretell_corpus_bytes" [] "Size of the corpus: earlier texts that drafters look up.";
        gauge CORPUS_TOKENS = "foretell_corpus_tokens" [] "Tokens of these texts.";
        gauge CORPUS_TEXTS = "foretell_corpus_texts" [] "Texts in the corpus.";
        counter CORPUS_EVENTS = "foretell_corpus_texts_total" ["event"]
            "Texts that were `learnt`, `known` already, `evicted` for room, `expired`, or `dropped` because too many came.";
        counter RECORDED = "foretell_recorded_requests_total" ["result"]
            "Requests to be recorded that were `written`, `dropped` because too many came, or `failed` because the disk refused.";
        counter LOG_DROPPED = "foretell_log_dropped_total" []
            "Lines of the log that were dropped because too many waited or they could not be written.";
        counter SPANS_DROPPED = "foretell_spans_dropped_total" [] "Spans that found no room in the queue, or that the collector did not take.";
        gauge BUILD = "foretell_build_info" ["version"] "1, with the version of this process.";
        gauge DRAINING = "foretell_draining" [] "1 while the process drains.";
        gauge CONFIG = "foretell_config_info" ["version"] "1, with the hash of the configuration in force.";
        gauge SYNCHRONIZED = "foretell_config_synchronized" [] "0 while the files have content that could not be taken.";
        gauge CONFIG_SUCCESS = "foretell_config_last_success_timestamp_seconds" [] "When a configuration was last taken, Unix time.";
        counter RELOADS = "foretell_config_reloads_total" ["result"] "Reloads: `success`, or `failure`, which keeps the configuration in force.";
        counter BUSY = "foretell_runtime_busy_seconds_total" [] "Time that the network threads were busy, all together.";
        gauge WORKERS = "foretell_runtime_workers" [] "Network threads.";
        counter CPU = "process_cpu_seconds_total" [] "User and system time of this process.";
        gauge OPEN_FDS = "process_open_fds" [] "Open file descriptors.";
        gauge MAX_FDS = "process_max_fds" [] "Maximum number of open file descriptors.";
        gauge VIRTUAL = "process_virtual_memory_bytes" [] "Virtual memory.";
        gauge RESIDENT = "process_resident_memory_bytes" [] "Resident memory.";
        gauge START = "process_start_time_seconds" [] "When this process started, Unix time.";
        gauge THREADS = "process_threads" [] "Threads of this process.";
    }
    "`foretell target` (on its `/metrics`)" {
        gauge TARGET_RUNNING = "foretell_target_requests_running" [] "Sequences that have a lane.";
        gauge TARGET_WAITING = "foretell_target_requests_waiting" [] "Sequences that wait for a lane.";
        gauge TARGET_LIMIT = "foretell_target_requests_limit" [] "Maximum number of sequences with a lane at once.";
        gauge TARGET_KV = "foretell_target_kv_usage_ratio" [] "Share of the cache that running requests use.";
        counter TARGET_PROMPT = "foretell_target_prompt_tokens_total" [] "Prompt tokens of sequences that got a lane.";
        counter TARGET_CACHED = "foretell_target_cached_tokens_total" [] "Prompt tokens that were in the cache already.";
        counter TARGET_GENERATED = "foretell_target_generated_tokens_total" [] "Tokens generated.";
        counter TARGET_COMPUTED = "foretell_target_computed_tokens_total" [] "Tokens that went through the model.";
        counter TARGET_DRAFTED = "foretell_target_verify_drafted_tokens_total" [] "Draft tokens judged by /v1/verify.";
        counter TARGET_ACCEPTED = "foretell_target_verify_accepted_tokens_total" [] "Draft tokens confirmed by /v1/verify.";
        counter TARGET_DROPPED = "foretell_target_requests_dropped_total" []
            "Running sequences whose result nobody waited for: client gone, or stop string found.";
        counter TARGET_REQUESTS = "foretell_target_requests_total" ["route", "status"] "Requests answered, streams when they begin.";
        histogram TARGET_STEP = "foretell_target_step_seconds" ["kind"] in STEP "Duration of one run of the model.";
    }
}
