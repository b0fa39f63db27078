//! `foretell demo`: the bundled models served over loopback HTTP, plain and speculated side by
//! side.

pub mod endpoints;

use std::io::{IsTerminal, Write, stdout};
use std::path::{Path, PathBuf};
use std::time::Duration;

use self::endpoints::DemoEndpoints;
use super::Exit;
use crate::bench::canvas::Canvas;
use crate::bench::demo::{Stack, invitation, show, showcase};
use crate::bench::workload::{self, Workload};
use foretell_config::process::LogFormat;
use foretell_config::variables::Environment;

/// Show the bundled models plain and speculated side by side, then serve them until Ctrl-C.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct DemoArgs {
    /// Stop after the comparison; exit 2 if a text differs
    #[arg(long)]
    pub once: bool,
    /// Folder of the bundled models [env: FORETELL_MODELS] [default: models or
    /// ../share/foretell/models next to the program, else onnx/models of the repository that
    /// contains the program or the working directory]
    #[arg(long, value_name = "DIR")]
    pub models: Option<PathBuf>,
    /// Folder of the target; default: `target` among the bundled models. `make demo` shows one with
    /// more layers: more expensive steps, the same text
    #[arg(long, value_name = "DIR")]
    pub target: Option<PathBuf>,
    /// Folder of the workloads whose first prompts are shown [default: built-in edits, then some of
    /// tests/workloads if the repository is found]
    #[arg(long, value_name = "DIR")]
    pub workloads: Option<PathBuf>,
    /// Prompts of each workload
    #[arg(long, value_name = "N", default_value_t = 2)]
    pub prompts: usize,
    /// Address that Foretell serves on [env: FORETELL_LISTEN] [default: 127.0.0.1:8080, with --once
    /// a free port]
    #[arg(long, value_name = "IP:PORT")]
    pub listen: Option<String>,
    /// Address of its admin API and status page [env: FORETELL_ADMIN] [default: 127.0.0.1:9464,
    /// with --once a free port]
    #[arg(long, value_name = "IP:PORT")]
    pub admin: Option<String>,
    /// Address that the target serves on [env: FORETELL_DIRECT] [default: 127.0.0.1:8000, with
    /// --once a free port]
    #[arg(long, value_name = "IP:PORT")]
    pub direct: Option<String>,
}

/// Time that the exit waits for threads that still compute.
const LAST_STEPS: Duration = Duration::from_millis(200);

/// Starts the servers in this process, prints the comparison and stops the servers.
pub fn main(args: &DemoArgs) -> Exit {
    let fail = |error: &dyn std::fmt::Display| {
        super::complain(&format_args!("foretell demo: {error}"));
        Exit::Unreachable
    };
    foretell_observe::log::init(LogFormat::Text, "warn");
    let endpoints = match DemoEndpoints::read(args, &Environment) {
        Ok(endpoints) => endpoints,
        Err(error) => {
            let _ = fail(&error);
            return Exit::Usage;
        }
    };
    let runtime = match super::runtime() {
        Ok(runtime) => runtime,
        Err(error) => return fail(&error),
    };
    let exit = runtime.block_on(async {
        match servers::start(args, &endpoints).await {
            Ok(servers) => run(args, &endpoints.models, &servers.stack).await,
            Err(error) => fail(&error),
        }
    });
    // The results of threads that still compute are not needed.
    runtime.shutdown_timeout(LAST_STEPS);
    exit
}

/// Prints the comparison for servers that already run. Without `--once` it then waits for SIGINT or
/// SIGTERM. The caller starts and stops the servers.
pub async fn run(args: &DemoArgs, models: &Path, stack: &Stack) -> Exit {
    run_on(args, models, stack, canvas(), &mut stdout()).await
}

/// As [`run`], with a given canvas and output.
pub async fn run_on(
    args: &DemoArgs,
    models: &Path,
    stack: &Stack,
    canvas: Canvas,
    out: &mut impl Write,
) -> Exit {
    let workloads = match workloads(args, models) {
        Ok(workloads) => workloads,
        Err(error) => {
            super::complain(&format_args!("foretell demo: {error}"));
            return Exit::Usage;
        }
    };
    let same = match show(stack, &workloads, args.prompts, canvas, out).await {
        Ok(same) => same,
        Err(stopped) => {
            super::complain(&format_args!("foretell demo: {stopped}"));
            return Exit::Unreachable;
        }
    };
    if args.once {
        return if same { Exit::Done } else { Exit::RequirementNotMet };
    }
    let _ = writeln!(out, "\n{}", invitation(stack));
    interrupted().await;
    // Serving until a signal counts as success, regardless of the comparison.
    Exit::Done
}

/// The workloads that are shown: those of the named folder, else the built-in ones and some of the
/// repository.
fn workloads(args: &DemoArgs, models: &Path) -> Result<Vec<Workload>, workload::Error> {
    if let Some(folder) = &args.workloads {
        return Workload::read_folder(folder);
    }
    let mut all = showcase()?;
    all.extend(endpoints::others(models)?);
    Ok(all)
}

/// Width and colours of standard output.
fn canvas() -> Canvas {
    if !stdout().is_terminal() {
        return Canvas::plain();
    }
    let (_, width) = console::Term::stdout().size();
    let colour = std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
    Canvas::terminal(usize::from(width).clamp(40, 200), colour)
}

/// Returns on Ctrl-C or SIGTERM.
async fn interrupted() {
    let Ok(mut terminate) = tokio::signal::unix::signal(tokio::signal::unix::SignalKind::terminate()) else {
        let _ = tokio::signal::ctrl_c().await;
        return;
    };
    tokio::select! {
        _ = tokio::signal::ctrl_c() => {}
        _ = terminate.recv() => {}
    }
}

mod servers {
    use std::path::Path;

    use serde_json::Value;

    use super::DemoArgs;
    use super::endpoints::DemoEndpoints;
    use crate::app::Running;
    use crate::app::local::{self, LocalError, LocalTarget};
    use crate::bench::demo::{About, Stack};
    use foretell_onnx::open::Options;
    use foretell_onnx::target::open::open;
    use foretell_proxy::serving::drafters::Drafters;

    type Failed = Box<dyn std::error::Error>;

    /// Without a control group: every request of the demo is eligible.
    const POLICY: &str = r"
version: 1
name: demo
drafters: [{ kind: prompt_lookup, ngram: { min: 2, max: 8 } }, { kind: model, model: draft-same, vocabulary: same }]
holdback: { start: 0, floor: 0 }
";

    /// The servers of a demo; dropping them stops them.
    pub(super) struct Servers {
        pub(super) stack: Stack,
        _target: LocalTarget,
        _proxy: Running,
    }

    pub(super) async fn start(args: &DemoArgs, endpoints: &DemoEndpoints) -> Result<Servers, Failed> {
        let bundled = endpoints.models.join("target");
        let folder = args.target.clone().unwrap_or_else(|| bundled.clone());
        let opened = open(&folder, Some("foretell-target".to_owned()), &Options::default(), None)?;
        let target = LocalTarget::start_at(opened.app, endpoints.direct).await.map_err(taken("direct"))?;
        let drafter = endpoints.models.join("draft-same");
        let process = format!(
            "version: 1\nbackends: [{{ name: target, engine: onnx, replicas: [\"http://{}\"], probe: {{ when: never }} }}]\n\
             drafters: {{ draft-same: {{ path: {:?} }} }}\n",
            target.address,
            drafter.display().to_string(),
        );
        let addresses = [endpoints.listen, endpoints.admin];
        let proxy = local::proxy_at(&process, &[POLICY], Drafters::default(), addresses).await;
        let proxy = proxy.map_err(taken("listen and --admin"))?;
        let (plain, shown) = (layout(&bundled)?, layout(&folder)?);
        let address = proxy.gateway.addresses.first().copied().ok_or("the proxy does not listen")?;
        let stack = Stack {
            direct: target.address.into(),
            through: address.into(),
            admin: proxy.gateway.admin.ok_or("the admin listener is not there")?.into(),
            about: About {
                model: opened.name,
                parameters: plain.parameters,
                // Only the device's name, without the reason for choosing it.
                device: opened.device.split(',').next().unwrap_or_default().to_owned(),
                inflate: (shown.layers / plain.layers.max(1)) as u32,
                drafters: vec!["prompt_lookup".to_owned(), "draft-same".to_owned()],
            },
        };
        Ok(Servers { stack, _target: target, _proxy: proxy })
    }

    /// Adds the flag that chooses another address.
    fn taken(flag: &'static str) -> impl Fn(LocalError) -> Failed {
        move |error| {
            let text = error.to_string();
            let hint =
                text.contains("Address already in use").then(|| format!("; choose another by --{flag}"));
            format!("{text}{}", hint.unwrap_or_default()).into()
        }
    }

    struct ModelLayout {
        layers: u64,
        parameters: u64,
    }

    /// Layers and parameters of a Llama model, computed from its `config.json`.
    fn layout(folder: &Path) -> Result<ModelLayout, Failed> {
        let path = folder.join("config.json");
        let text = std::fs::read(&path).map_err(|error| format!("{}: {error}", path.display()))?;
        let config: Value = serde_json::from_slice(&text)?;
        let field = |name: &str| {
            config.get(name).and_then(Value::as_u64).ok_or_else(|| format!("{}: no {name}", path.display()))
        };
        let (hidden, layers, inner) =
            (field("hidden_size")?, field("num_hidden_layers")?, field("intermediate_size")?);
        let heads = field("num_attention_heads")? + field("num_key_value_heads")?;
        let attention = 2 * hidden * heads * field("head_dim")?;
        let layer = attention + 3 * hidden * inner + 2 * hidden;
        let parameters = field("vocab_size")? * hidden + layers * layer + hidden;
        Ok(ModelLayout { layers, parameters })
    }
}
