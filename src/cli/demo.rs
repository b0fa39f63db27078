//! `foretell demo`: the bundled models over loopback HTTP, plain and speculated side by side.

use std::io::{IsTerminal, Write, stdout};
use std::path::PathBuf;

use crate::lab::Exit;
use crate::lab::canvas::Canvas;
use crate::lab::demo::{Stack, invitation, show};
use crate::lab::workload::Workload;

/// Show the bundled models plain and speculated side by side, then serve them.
#[derive(Clone, Debug, clap::Args)]
pub struct DemoArgs {
    /// Stop after the comparison; exit 2 if a text differs.
    #[arg(long)]
    pub once: bool,
    /// Folder of the bundled models.
    #[arg(long, value_name = "DIR", default_value = "onnx/models")]
    pub models: PathBuf,
    /// Multiply the target's depth by this: dearer steps, the same text.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=64))]
    pub inflate: u32,
    /// Folder of the workloads whose first prompts are shown.
    #[arg(long, value_name = "DIR", default_value = "tests/workloads")]
    pub workloads: PathBuf,
    /// Prompts of each workload.
    #[arg(long, value_name = "N", default_value_t = 2)]
    pub prompts: usize,
}

/// Shows the comparison on servers that run already; without `--once` returns when interrupted. The caller
/// starts the servers before and stops them afterwards.
pub async fn run(args: &DemoArgs, stack: &Stack) -> Exit {
    run_on(args, stack, canvas(), &mut stdout()).await
}

/// The same, onto any canvas.
pub async fn run_on(args: &DemoArgs, stack: &Stack, canvas: Canvas, out: &mut impl Write) -> Exit {
    let workloads = match Workload::read_folder(&args.workloads) {
        Ok(workloads) => workloads,
        Err(error) => {
            eprintln!("foretell demo: {error}");
            return Exit::Usage;
        }
    };
    let exit = show(stack, &workloads, args.prompts, canvas, out).await;
    if args.once || exit == Exit::Unreachable {
        return exit;
    }
    let _ = writeln!(out, "\n{}", invitation(stack));
    interrupted().await;
    // The comparison was on show; having served until told to stop is success.
    Exit::Done
}

/// What standard output can show.
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
