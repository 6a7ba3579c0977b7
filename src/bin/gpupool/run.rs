//! `gpupool run`: sets the environment and becomes the program.

use std::env;
use std::ffi::{OsStr, OsString};
use std::io::ErrorKind;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode};

use crate::{USAGE, fail, program, settings};

/// Start a program with the pool under it
///
/// Puts the library in front of LD_PRELOAD and becomes the program: process id, signals and exit code
/// are the program's own. What the program starts inherits the environment, and with it the pool.
///
/// An option stands for the setting in brackets, and overrides that variable. Other settings are given
/// as variables, as always.
#[derive(clap::Args)]
#[command(
    verbatim_doc_comment,
    after_help = "\
Examples:
  gpupool run python3 train.py
  gpupool run --report --max-percent 40 -- ./solver -n 3
  GPUPOOL_DECAY_MS=500 gpupool run ./server

Exit codes: the program's own; 127 when it is not found, 126 when it cannot be executed, 2 when an
option is wrong or the library is missing or another file."
)]
pub struct Options {
    /// Hold at most this part of each device's memory, over 0 to 100 [GPUPOOL_MAX_MEM_PERCENT]
    #[arg(long, value_name = "N", allow_hyphen_values = true, value_parser = taken_by("GPUPOOL_MAX_MEM_PERCENT"))]
    max_percent: Option<String>,
    /// Hold at most this much of each device's memory: bytes, or 512m, 12g [GPUPOOL_MAX_MEM]
    #[arg(long, value_name = "SIZE", allow_hyphen_values = true, value_parser = taken_by("GPUPOOL_MAX_MEM"))]
    max_mem: Option<String>,
    /// Frees: order (on the device), barrier (one at every free) or sync (the host waits) [GPUPOOL_FREE]
    #[arg(long, value_name = "HOW", allow_hyphen_values = true, value_parser = taken_by("GPUPOOL_FREE"))]
    free: Option<String>,
    /// Report on standard error at exit what was served [GPUPOOL_REPORT]
    #[arg(long)]
    report: bool,
    /// Messages on standard error: off, error, warn, info, debug or trace [GPUPOOL_LOG]
    #[arg(long, value_name = "LEVEL", allow_hyphen_values = true, value_parser = taken_by("GPUPOOL_LOG"))]
    log: Option<String>,
    /// The program, by its path or by name on the PATH, and its arguments
    #[arg(value_name = "PROGRAM", required = true, trailing_var_arg = true)]
    command: Vec<OsString>,
}

pub fn run(options: Options) -> ExitCode {
    let library = match crate::library() {
        Ok(path) => path,
        Err(why) => return fail(&why, USAGE),
    };
    // clap has seen to it that there is one.
    let name = &options.command[0];
    let mut command = Command::new(name);
    command.args(&options.command[1..]);
    command.env("LD_PRELOAD", preload(library.as_os_str(), env::var_os("LD_PRELOAD").as_deref()));
    let settings = [
        ("GPUPOOL_MAX_MEM_PERCENT", options.max_percent),
        ("GPUPOOL_MAX_MEM", options.max_mem),
        ("GPUPOOL_FREE", options.free),
        ("GPUPOOL_REPORT", options.report.then(|| "1".into())),
        ("GPUPOOL_LOG", options.log),
    ];
    command.envs(settings.into_iter().filter_map(|(variable, value)| Some((variable, value?))));
    let error = command.exec();
    // As in a shell: 127 is "not found", 126 is "found and not executable".
    let shown = name.to_string_lossy();
    match error.kind() {
        ErrorKind::NotFound if program::find(name).is_some() => {
            fail(&format!("{shown}: the interpreter or loader that it names is not found"), 127)
        }
        ErrorKind::NotFound => fail(&format!("{shown}: program not found"), 127),
        _ => fail(&format!("{shown}: cannot be executed: {error}"), 126),
    }
}

/// `library` in front of what `before` holds, and there only once: one `gpupool run` may run another.
fn preload(library: &OsStr, before: Option<&OsStr>) -> OsString {
    let library = library.as_bytes();
    let before = before.unwrap_or_default().as_bytes();
    let others = before.split(|b| matches!(b, b':' | b' ')).filter(|entry| !entry.is_empty() && *entry != library);
    OsString::from_vec([library].into_iter().chain(others).collect::<Vec<_>>().join(&b':'))
}

/// The library would warn of a value that `variable` does not take, and go on without; here it is an error before anything runs.
fn taken_by(variable: &'static str) -> impl Fn(&str) -> Result<String, String> + Clone {
    move |text| settings::check(variable, text).map(|()| text.into())
}
