//! The `gpupool` command: starts a program with the library preloaded, and says what stands in the way of it. It knows the
//! library as a file and by its settings, whose table it shares; it uses no other code of it.

mod doctor;
mod program;
mod run;
#[path = "../../config/settings.rs"]
#[allow(dead_code)] // what the library alone asks
mod settings;

use std::env;
use std::io::Write;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// The exit code when an argument or the library is wrong: nothing was run.
const USAGE: u8 = 2;

#[derive(Parser)]
#[command(
    name = "gpupool",
    version,
    about = "A caching allocator for CUDA memory, put under programs as they are",
    after_help = "\
`gpupool run` starts a program with libgpupool.so preloaded; `gpupool doctor` says whether that has an
effect. The library is looked for in this order: $GPUPOOL_LIBRARY, the folder of this command, and
../lib and ../lib64 from there.",
    disable_help_subcommand = true
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Run(run::Options),
    Doctor(doctor::Options),
}

fn main() -> ExitCode {
    match Cli::try_parse().map(|cli| cli.command) {
        Ok(Command::Run(options)) => run::run(options),
        Ok(Command::Doctor(options)) => doctor::doctor(options),
        // What is wrong is told as this command tells all else; clap prints help and the version itself.
        Err(answer) => match answer.render().to_string().strip_prefix("error: ") {
            Some(wrong) => fail(wrong.trim_end(), USAGE),
            None => answer.exit(),
        },
    }
}

/// Says what is wrong. Standard error may be closed: the exit code still tells.
fn fail(why: &str, code: u8) -> ExitCode {
    let _ = writeln!(std::io::stderr(), "gpupool: {why}");
    ExitCode::from(code)
}

/// Where the library is, as an absolute path that `LD_PRELOAD` can name; else what to tell the user. The loader itself would
/// pass over what it cannot load with a line on standard error, and the program would run without the pool.
fn library() -> Result<PathBuf, String> {
    let (path, shown) = match env::var_os("GPUPOOL_LIBRARY").filter(|named| !named.is_empty()) {
        Some(named) => {
            let shown = format!("GPUPOOL_LIBRARY={}", named.to_string_lossy());
            (std::path::absolute(named).map_err(|e| format!("{shown}: {e}"))?, shown)
        }
        None => {
            let path = nearby_library()?;
            let shown = path.display().to_string();
            (path, shown)
        }
    };
    program::is_the_library(&path).map_err(|why| format!("{shown}: {why}"))?;
    // The loader splits LD_PRELOAD at both, and there is no way to quote them.
    if path.as_os_str().as_bytes().iter().any(|b| matches!(b, b' ' | b':')) {
        return Err(format!("{shown}: a blank or a colon in the path, which LD_PRELOAD cannot name; move or link it"));
    }
    Ok(path)
}

fn nearby_library() -> Result<PathBuf, String> {
    let exe = env::current_exe().map_err(|e| format!("cannot tell where this command lies: {e}"))?;
    let mut folders: Vec<PathBuf> = exe.parent().map(PathBuf::from).into_iter().collect();
    if let Some(prefix) = exe.parent().and_then(|bin| bin.parent()) {
        folders.extend([prefix.join("lib"), prefix.join("lib64")]);
    }
    let names = ["libgpupool.so", "libgpupool.so.0"];
    let found = folders.iter().flat_map(|f| names.map(|n| f.join(n))).find(|path| path.is_file());
    found.ok_or_else(|| {
        let places: Vec<String> = folders.iter().map(|f| f.display().to_string()).collect();
        format!("libgpupool.so is in none of {}; set GPUPOOL_LIBRARY to where it is", places.join(", "))
    })
}
