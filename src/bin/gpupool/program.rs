//! Whether a program's CUDA calls would be reached by a preloaded library, as far as its files tell.

use std::ffi::{CStr, CString, OsStr};
use std::fs;
use std::io::ErrorKind;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use memchr::memmem;
use object::Endianness;
use object::elf::{DT_NEEDED, DT_STRSZ, DT_STRTAB, EM_X86_64, ET_DYN, FileHeader64, SHN_UNDEF, SHT_DYNSYM};
use object::read::elf::{Dyn, FileHeader, ProgramHeader, Sym};

/// Interpreters that load CUDA when a script asks for it, if at all.
const RUNTIMES: &[&str] = &["python", "pypy", "julia", "java", "node", "ruby", "perl", "lua", "luajit", "octave", "R"];
/// Interpreters that start other programs.
const SHELLS: &[&str] = &["sh", "bash", "dash", "zsh", "ksh", "fish", "tcsh"];

/// Scripts of scripts that the kernel follows.
const SCRIPTS: u32 = 5;

/// Whether the loader can preload `path`, and it is gpupool's library; else what it is.
pub fn is_the_library(path: &Path) -> Result<(), String> {
    match fs::metadata(path) {
        Err(e) if e.kind() == ErrorKind::NotFound => return Err("there is no such file".into()),
        Ok(m) if !m.is_file() => return Err("not a file".into()),
        _ => {}
    }
    let data = fs::read(path).map_err(|e| format!("cannot be read: {e}"))?;
    let Some(exported) = exports(&data, b"gpupoolMalloc") else {
        return Err("not a shared library of 64-bit x86".into());
    };
    if exported { Ok(()) } else { Err("a shared library, but not gpupool's".into()) }
}

/// Whether a shared library has the symbol `name` for others; None for what is no shared library.
fn exports(data: &[u8], name: &[u8]) -> Option<bool> {
    let header = FileHeader64::<Endianness>::parse(data).ok()?;
    let endian = header.endian().ok()?;
    if header.e_machine(endian) != EM_X86_64 || header.e_type(endian) != ET_DYN {
        return None;
    }
    let symbols = header.sections(endian, data).ok()?.symbols(endian, data, SHT_DYNSYM).ok()?;
    let is_it = |sym: &object::elf::Sym64<Endianness>| {
        sym.st_shndx(endian) != SHN_UNDEF && sym.name(endian, symbols.strings()) == Ok(name)
    };
    Some(symbols.iter().any(is_it))
}

/// The file that `execvp` would take for `name`.
pub fn find(name: &OsStr) -> Option<PathBuf> {
    if name.as_bytes().contains(&b'/') {
        return Some(PathBuf::from(name)).filter(|path| path.is_file());
    }
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|folder| folder.join(name)).find(|file| executable(file))
}

fn executable(file: &Path) -> bool {
    fs::metadata(file).is_ok_and(|m| m.is_file() && m.mode() & 0o111 != 0)
}

/// What is to be said of a program that exists. Err when the pool would not reach its CUDA calls, or it cannot run at all; Ok too
/// where nothing speaks against it.
pub fn verdict(path: &Path) -> Result<String, String> {
    inspect(path, 0)
}

/// `depth` counts the scripts on the way: an interpreter may be a script itself.
fn inspect(path: &Path, depth: u32) -> Result<String, String> {
    if !executable(path) {
        return Err("is not executable".into());
    }
    if let Some(why) = raised(path) {
        return Err(format!("{why}: the loader ignores LD_PRELOAD for it; not reached"));
    }
    let data = match fs::read(path) {
        Ok(data) => data,
        Err(e) => return Ok(format!("cannot be read, so nothing can be told: {e}")),
    };
    if data.starts_with(b"#!") {
        return script(&data, depth);
    }
    if !data.starts_with(b"\x7fELF") {
        return Ok("neither ELF nor a script with #!: nothing can be told".into());
    }
    let Some(elf) = Elf::parse(&data) else {
        return Err(
            "not a 64-bit x86 program, or a damaged one: the library cannot be loaded into it; not reached".into()
        );
    };
    let Some(loader) = elf.loader else {
        return Err("statically linked: no loader reads LD_PRELOAD; not reached".into());
    };
    if loader.contains("musl") {
        return Err("runs on musl, the library on glibc: the two do not mix; not reached".into());
    }
    Ok(doors(path, &data, &libraries(path, &loader, elf.needed)))
}

/// Why the loader runs this file in secure mode, if it does.
fn raised(path: &Path) -> Option<&'static str> {
    let mode = fs::metadata(path).ok()?.mode();
    if mode & libc::S_ISUID != 0 {
        return Some("setuid");
    }
    // Without the group's execute bit, setgid is no more than a lock mode of old.
    if mode & libc::S_ISGID != 0 && mode & libc::S_IXGRP != 0 {
        return Some("setgid");
    }
    let name = CString::new(path.as_os_str().as_bytes()).ok()?;
    // SAFETY: two C strings; size 0 asks for the length alone.
    let len = unsafe { libc::getxattr(name.as_ptr(), c"security.capability".as_ptr(), std::ptr::null_mut(), 0) };
    (len > 0).then_some("has file capabilities")
}

/// `#!/usr/bin/env -S python3 -u`: what counts is the interpreter.
fn script(data: &[u8], depth: u32) -> Result<String, String> {
    let line = data[2..].split(|b| *b == b'\n').next().unwrap_or_default();
    let mut words = line.split(|b| b.is_ascii_whitespace()).filter(|w| !w.is_empty()).map(OsStr::from_bytes);
    let mut name = words.next().unwrap_or_default();
    if Path::new(name).file_name() == Some(OsStr::new("env")) {
        // Options and assignments come before the name.
        let plain = |w: &&OsStr| !w.as_bytes().starts_with(b"-") && !w.as_bytes().contains(&b'=');
        name = words.find(plain).unwrap_or(name);
    }
    let shown = name.to_string_lossy();
    match find(name) {
        None => Err(format!("a script, whose interpreter {shown} is not found")),
        Some(_) if depth >= SCRIPTS => {
            Err("a script of a script, and so on: more of them than the kernel follows".into())
        }
        Some(path) => {
            let about = |text: String| format!("a script for {}: {text}", path.display());
            inspect(&path, depth + 1).map(about).map_err(about)
        }
    }
}

/// By which door a dynamic program is reached.
fn doors(path: &Path, data: &[u8], libraries: &[Library]) -> String {
    let named = |stem: &str| libraries.iter().map(|l| l.name.as_str()).find(|name| name.starts_with(stem));
    let linked = if named("libgpupool.so").is_some() { "; linked to libgpupool too" } else { "" };
    let reached = match (named("libcudart.so"), named("libcuda.so")) {
        (Some(cudart), Some(cuda)) => format!("links {cudart} and {cuda}: reached by the runtime and the driver door"),
        (Some(cudart), None) => format!("links {cudart}: reached by the runtime door"),
        (None, Some(cuda)) => format!("links {cuda}: reached by the driver door"),
        (None, None) if has_cuda_inside(data) => "has CUDA's runtime inside: reached by the driver door".into(),
        (None, None) => {
            let inside = |l: &&Library| !l.name.starts_with("libgpupool.so") && l.has_cuda_inside();
            match libraries.iter().find(inside) {
                Some(l) => format!("its {} has CUDA's runtime inside: reached by the driver door", l.name),
                None if is_one_of(SHELLS, path) => "a shell: what it starts inherits the pool; look at that".into(),
                None if is_one_of(RUNTIMES, path) => {
                    "loads CUDA at run time: reached by the driver door when it does".into()
                }
                None => "shows no CUDA; should it load CUDA at run time, the driver door reaches it".into(),
            }
        }
    };
    reached + linked
}

/// A static cudart, and whoever else finds the driver by itself, has one of these names among its strings.
fn has_cuda_inside(data: &[u8]) -> bool {
    [&b"cuGetProcAddress"[..], b"libcuda.so"].iter().any(|name| memmem::find(data, name).is_some())
}

/// `python3.12` is a `python`.
fn is_one_of(names: &[&str], path: &Path) -> bool {
    let real = path.canonicalize().unwrap_or_else(|_| path.into());
    [path, &real].iter().any(|p| {
        let name = p.file_name().unwrap_or_default().to_string_lossy();
        names.contains(&name.trim_end_matches(|c: char| c.is_ascii_digit() || matches!(c, '.' | '-')))
    })
}

struct Library {
    name: String,
    file: Option<PathBuf>,
}

impl Library {
    fn has_cuda_inside(&self) -> bool {
        self.file.as_ref().and_then(|file| fs::read(file).ok()).is_some_and(|data| has_cuda_inside(&data))
    }
}

/// The shared libraries that the loader would load, those of libraries too; the program's own where the loader does not say.
fn libraries(path: &Path, loader: &str, needed: Vec<String>) -> Vec<Library> {
    let mut command = Command::new(loader);
    // A bare name would be looked for among the libraries.
    let path = std::path::absolute(path).unwrap_or_else(|_| path.into());
    command.arg("--list").arg(path).env_remove("LD_PRELOAD");
    let listed = command.output().map(|out| String::from_utf8_lossy(&out.stdout).into_owned()).unwrap_or_default();
    // `libm.so.6 => /lib/libm.so.6 (0x...)`, or `=> not found`.
    let mut all: Vec<Library> = listed
        .lines()
        .filter_map(|line| line.trim().split_once(" => "))
        .map(|(name, rest)| {
            let file = rest.rsplit_once(" (").map(|(file, _)| PathBuf::from(file));
            Library { name: name.into(), file }
        })
        .collect();
    let unlisted: Vec<String> = needed.into_iter().filter(|name| all.iter().all(|l| l.name != *name)).collect();
    all.extend(unlisted.into_iter().map(|name| Library { name, file: None }));
    all
}

/// What of an ELF file matters here.
struct Elf {
    loader: Option<String>,
    needed: Vec<String>,
}

impl Elf {
    /// None for what is not a 64-bit x86 program.
    fn parse(data: &[u8]) -> Option<Elf> {
        let header = FileHeader64::<Endianness>::parse(data).ok()?;
        let endian = header.endian().ok()?;
        if header.e_machine(endian) != EM_X86_64 {
            return None;
        }
        let segments = header.program_headers(endian, data).ok()?;
        let loader = segments.iter().find_map(|s| s.interpreter(endian, data).ok()?);
        let loader = loader.map(|name| String::from_utf8_lossy(name).into_owned());
        let entries = segments.iter().find_map(|s| s.dynamic(endian, data).ok()?).unwrap_or_default();
        // The table of names is told of by its address in memory.
        let value = |tag| entries.iter().find(|d| d.d_tag(endian) == u64::from(tag)).map(|d| d.d_val(endian));
        let names = value(DT_STRTAB).zip(value(DT_STRSZ)).and_then(|(address, size)| {
            segments.iter().find_map(|s| s.data_range(endian, data, address, size).ok()?)
        });
        let name = |offset: u64| CStr::from_bytes_until_nul(names?.get(offset as usize..)?).ok();
        let needed = entries
            .iter()
            .filter(|d| d.d_tag(endian) == u64::from(DT_NEEDED))
            .filter_map(|d| Some(name(d.d_val(endian))?.to_string_lossy().into_owned()))
            .collect();
        Some(Elf { loader, needed })
    }
}
