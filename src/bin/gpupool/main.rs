//! The `gpupool` command: starts a program with the library preloaded, and says what stands in the way of it. It knows the
//! library as a file and by its settings; it uses none of its code.

mod doctor;
mod program;
mod run;

use std::env;
use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// What `gpupool run` answers when it cannot start: nothing was run.
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
    match Cli::parse().command {
        Command::Run(options) => run::run(options),
        Command::Doctor(options) => doctor::doctor(options),
    }
}

/// Where the library is, as an absolute path that `LD_PRELOAD` can name; else what to tell the user.
fn library() -> Result<PathBuf, String> {
    let path = match env::var_os("GPUPOOL_LIBRARY").filter(|named| !named.is_empty()) {
        Some(named) => named_library(named)?,
        None => nearby_library()?,
    };
    // The loader splits LD_PRELOAD at both, and there is no way to quote them.
    if path.as_os_str().as_bytes().iter().any(|b| matches!(b, b' ' | b':')) {
        let path = path.display();
        return Err(format!("{path} has a blank or a colon in its path: LD_PRELOAD cannot name it; move or link it"));
    }
    Ok(path)
}

fn named_library(named: OsString) -> Result<PathBuf, String> {
    let shown = named.to_string_lossy().into_owned();
    let path = std::path::absolute(named).map_err(|e| format!("GPUPOOL_LIBRARY={shown}: {e}"))?;
    if path.is_file() { Ok(path) } else { Err(format!("GPUPOOL_LIBRARY={shown}: there is no such file")) }
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
