//! `foretell completions` and `foretell man`: shell completions and manual pages of the command
//! line.

use std::io::{self, Write};
use std::path::{Path, PathBuf};

use clap_complete::Shell;
use clap_mangen::Man;
use clap_mangen::roff::{Roff, bold, roman};

use super::{ENVIRONMENT, EXITS, Exit, Terms};

/// Print the completions for a shell, such as `foretell completions bash >
/// /etc/bash_completion.d/foretell`.
#[derive(clap::Args, Clone, Debug)]
pub struct CompletionsArgs {
    /// The shell
    #[arg(value_enum)]
    pub shell: Shell,
}

/// Print the manual page of `foretell`, or write those of all commands to a folder.
#[derive(clap::Args, Clone, Debug)]
pub struct ManArgs {
    /// Write foretell.1, foretell-serve.1 and so on to this folder, which must exist
    #[arg(long, value_name = "DIR")]
    pub dir: Option<PathBuf>,
}

/// Prints the completions; returns the exit code.
///
/// # Errors
/// `out` cannot be written.
pub fn completions(args: &CompletionsArgs, out: &mut dyn Write) -> io::Result<u8> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut shown(), "foretell", &mut script);
    out.write_all(&script).map(|()| super::OK)
}

/// Prints the page, or writes all of them.
pub fn man(args: &ManArgs, out: &mut dyn Write) -> Exit {
    let Some(dir) = &args.dir else {
        // A closed pipe is not an error.
        let _ = write_page(&shown(), ENVIRONMENT, out);
        return Exit::Done;
    };
    let mut command = shown().disable_help_subcommand(true);
    command.build();
    match write_pages(&command, ENVIRONMENT, dir) {
        Ok(()) => Exit::Done,
        Err(error) => {
            super::complain(&format_args!("foretell man: {}: {error}", dir.display()));
            Exit::Usage
        }
    }
}

/// Writes the page of a command, which has this environment, and those of its subcommands.
fn write_pages(command: &clap::Command, environment: Terms, dir: &Path) -> io::Result<()> {
    command.get_subcommands().try_for_each(|below| write_pages(below, &[], dir))?;
    let mut file = std::fs::File::create(dir.join(Man::new(command.clone()).get_filename()))?;
    write_page(command, environment, &mut file)
}

/// Writes the page of a command. The terms of its help's last sections get the usual headings of
/// manual pages.
fn write_page(command: &clap::Command, environment: Terms, out: &mut dyn Write) -> io::Result<()> {
    let page = Man::new(command.clone());
    page.render_title(out)?;
    page.render_name_section(out)?;
    page.render_synopsis_section(out)?;
    page.render_description_section(out)?;
    page.render_options_section(out)?;
    if command.has_subcommands() {
        page.render_subcommands_section(out)?;
    }
    let mut roff = Roff::new();
    for (heading, terms) in [("ENVIRONMENT", environment), ("EXIT STATUS", EXITS)] {
        if !terms.is_empty() {
            roff.control("SH", [heading]);
        }
        for (term, meaning) in terms {
            roff.control("TP", []).text([bold(*term)]).text([roman(*meaning)]);
        }
    }
    roff.to_writer(out)?;
    if command.get_version().is_some() { page.render_version_section(out) } else { Ok(()) }
}

/// The command line without hidden commands.
fn shown() -> clap::Command {
    let full = super::command();
    let visible: Vec<clap::Command> =
        full.get_subcommands().filter(|command| !command.is_hide_set()).cloned().collect();
    // clap cannot remove a subcommand: the command is rebuilt with the others.
    let bare = clap::Command::new("foretell").version(super::VERSION);
    let about = full.get_about().cloned().unwrap_or_default();
    let after = full.get_after_help().cloned().unwrap_or_default();
    bare.about(about).after_help(after).subcommand_required(true).subcommands(visible)
}

#[cfg(test)]
mod tests {
    use clap::ValueEnum;

    use super::*;

    #[test]
    fn completions_of_every_shell_have_the_commands_and_nothing_hidden() {
        for shell in Shell::value_variants() {
            let mut script = Vec::new();
            assert_eq!(completions(&CompletionsArgs { shell: *shell }, &mut script).unwrap(), 0);
            let script = String::from_utf8(script).unwrap();
            for word in ["serve", "drain", "listen", "bench"] {
                assert!(script.contains(word), "{shell}: {word}");
            }
        }
    }

    #[test]
    fn there_is_a_page_for_every_command() {
        let mut page = Vec::new();
        assert_eq!(man(&ManArgs { dir: None }, &mut page), Exit::Done);
        let page = String::from_utf8(page).unwrap();
        assert!(page.contains(".TH foretell 1") && page.contains("foretell\\-serve"), "{page}");

        let folder = tempfile::tempdir().unwrap();
        let dir = Some(folder.path().to_owned());
        assert_eq!(man(&ManArgs { dir }, &mut Vec::new()), Exit::Done);
        let mut names: Vec<String> = folder
            .path()
            .read_dir()
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        let mut wanted = vec!["foretell.1".to_owned()];
        for command in shown().get_subcommands() {
            let name = format!("foretell-{}", command.get_name());
            let below = command.get_subcommands().map(|below| format!("{name}-{}.1", below.get_name()));
            wanted.extend(below);
            wanted.push(format!("{name}.1"));
        }
        wanted.sort();
        names.retain(|name| !name.ends_with("-help.1"));
        assert_eq!(names, wanted);
        let serve = std::fs::read_to_string(folder.path().join("foretell-serve.1")).unwrap();
        assert!(serve.contains("FORETELL_LISTEN") && serve.contains(".SH \"EXIT STATUS\""), "{serve}");
        assert!(!serve.contains("EXTRA") && !serve.contains("ENVIRONMENT"), "{serve}");
        let first = std::fs::read_to_string(folder.path().join("foretell.1")).unwrap();
        for heading in [".SH ENVIRONMENT", ".SH \"EXIT STATUS\"", ".SH VERSION"] {
            assert!(first.contains(heading), "{first}");
        }
        assert!(first.contains("ORT_DYLIB_PATH") && !first.contains("EXTRA"), "{first}");

        let nowhere = Some(folder.path().join("nowhere"));
        assert_eq!(man(&ManArgs { dir: nowhere }, &mut Vec::new()), Exit::Usage);
    }
}
