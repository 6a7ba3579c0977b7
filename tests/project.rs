//! What the project promises about itself: headers, exports, layers, sizes, the README's table, installation.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

fn read(path: impl AsRef<Path>) -> String {
    let path = root().join(path);
    std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

fn run(command: &mut Command) -> Output {
    let out = command.output().unwrap_or_else(|e| panic!("{command:?}: {e}"));
    let text = format!("{}{}", String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr));
    assert!(out.status.success(), "{command:?}\n{text}");
    out
}

/// A folder of this test's own.
fn scratch(name: &str) -> PathBuf {
    let dir = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name);
    let _ = std::fs::remove_dir_all(&dir);
    std::fs::create_dir_all(&dir).unwrap();
    dir
}

/// The files under `folders` whose names end in one of `ends`.
fn files(folders: &[&str], ends: &[&str]) -> Vec<PathBuf> {
    fn walk(dir: &Path, ends: &[&str], out: &mut Vec<PathBuf>) {
        for entry in std::fs::read_dir(dir).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                walk(&path, ends, out);
            } else if path.extension().is_some_and(|e| ends.iter().any(|end| e == *end)) {
                out.push(path);
            }
        }
    }
    let mut out = Vec::new();
    for folder in folders {
        walk(&root().join(folder), ends, &mut out);
    }
    assert!(out.len() > 10, "the sources were not found");
    out
}

/// The Rust sources of the library.
fn sources() -> Vec<PathBuf> {
    files(&["src"], &["rs"])
}

/// Says so past the test runner, which keeps what a passing test prints to itself.
fn skipped(what: &str) {
    let _ = std::io::stderr().write_all(format!("skipped: {what}\n").as_bytes());
}

#[test]
fn committed_headers_are_what_the_doors_say() {
    for header in ["cnmem.h", "gpupool.h"] {
        let fresh = std::fs::read_to_string(Path::new(env!("GPUPOOL_HEADERS")).join(header)).unwrap();
        assert!(read(format!("include/{header}")) == fresh, "include/{header} has drifted: make headers");
    }
}

#[test]
fn headers_compile_as_c_and_cpp_with_and_without_cuda() {
    let dir = scratch("headers");
    let source = "#include <cnmem.h>\n#include <gpupool.h>\n\
        int main(void) { cnmemDevice_t d; (void)d; cudaStream_t s = 0; (void)s; return CNMEM_VERSION - 100 + CNMEM_STATUS_SUCCESS; }\n";
    for (compiler, file, std) in [("gcc", "h.c", "-std=c11"), ("g++", "h.cpp", "-std=c++11")] {
        if Command::new(compiler).arg("--version").output().is_err() {
            skipped(&format!("the headers with {std}: there is no {compiler}"));
            continue;
        }
        let path = dir.join(file);
        std::fs::write(&path, source).unwrap();
        for cuda in [None, Some("tests/simcuda/include")] {
            let mut c = Command::new(compiler);
            c.args([std, "-Wall", "-Wextra", "-Werror", "-pedantic", "-c"]).arg(&path);
            c.arg("-I").arg(root().join("include")).arg("-o").arg(dir.join("h.o"));
            if let Some(cuda) = cuda {
                c.arg("-I").arg(root().join(cuda));
            }
            run(&mut c);
        }
    }
}

#[test]
fn cnmem_is_spelled_as_cnmem_spells_it() {
    let h = read("include/cnmem.h");
    for part in [
        "CNMEM_STATUS_SUCCESS = 0",
        "CNMEM_STATUS_CUDA_ERROR = 1",
        "CNMEM_STATUS_INVALID_ARGUMENT = 2",
        "CNMEM_STATUS_NOT_INITIALIZED = 3",
        "CNMEM_STATUS_OUT_OF_MEMORY = 4",
        "CNMEM_STATUS_UNKNOWN_ERROR = 5",
        "CNMEM_FLAGS_DEFAULT = 0",
        "CNMEM_FLAGS_CANNOT_GROW = 1",
        "CNMEM_FLAGS_CANNOT_STEAL = 2",
        "CNMEM_FLAGS_MANAGED = 4",
        "#define CNMEM_VERSION 100",
        "typedef struct cnmemDevice_t_ cnmemDevice_t;",
        "cnmemGetErrorString(cnmemStatus_t status)",
    ] {
        assert!(h.contains(part), "include/cnmem.h lacks: {part}");
    }
}

#[test]
fn only_the_public_symbols_are_exported() {
    let out = run(Command::new("nm").args(["-D", "--defined-only"]).arg(root().join("target/release/libgpupool.so")));
    let text = String::from_utf8(out.stdout).unwrap();
    let mut seen: Vec<&str> = text.lines().filter_map(|l| l.split_whitespace().last()).collect();
    seen.sort_unstable();
    let list = read("tests/exports.txt");
    let wanted: Vec<&str> = list.lines().collect();
    assert_eq!(seen, wanted, "target/release/libgpupool.so exports other symbols than tests/exports.txt lists");
}

/// The layers of `src/lib.rs`, top down; a module may use those below it and its own.
#[test]
fn no_module_imports_upward() {
    let lib = read("src/lib.rs");
    let layers: Vec<&str> = lib
        .lines()
        .skip_while(|l| !l.contains("```text"))
        .skip(1)
        .take_while(|l| !l.contains("```"))
        .flat_map(|l| {
            let l = l.trim_start_matches("//!");
            // The last line names several leaves; the others one layer and what it is.
            if l.contains("leaves") {
                l.trim().split("  ").next().unwrap_or("").split(", ").collect()
            } else {
                vec![l.split_whitespace().next().unwrap_or("")]
            }
        })
        .collect();
    assert!(layers.len() >= 8, "{layers:?}");
    for module in lib.lines().filter_map(|l| l.strip_prefix("mod ")).map(|m| m.trim_end_matches(';')) {
        assert!(module == "testing" || layers.contains(&module), "src/lib.rs lists no layer for {module}");
    }
    let leaves = layers.iter().position(|l| *l == "log").expect("the leaves are listed");
    let rank = |module: &str| {
        let at = layers.iter().position(|l| *l == module)?;
        // The leaves stand side by side, and may know the driver's plain types.
        Some(at.min(leaves))
    };
    for path in sources() {
        let inside = path.strip_prefix(root().join("src")).unwrap();
        let module = inside.iter().next().unwrap().to_str().unwrap().trim_end_matches(".rs").to_string();
        let Some(mine) = rank(&module) else { continue };
        for line in std::fs::read_to_string(&path).unwrap().lines() {
            assert!(!line.contains("crate::{"), "{}: one module a line, or this test sees none", inside.display());
            for used in line.split("crate::").skip(1) {
                let used: String = used.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect();
                let Some(theirs) = rank(&used) else { continue };
                let types_of_driver = module == "error" && used == "driver";
                assert!(
                    theirs >= mine || types_of_driver,
                    "{}: {module} uses {used}, which is above it",
                    inside.display()
                );
            }
        }
    }
}

#[test]
fn only_driver_names_cudarc() {
    for path in sources() {
        let named = std::fs::read_to_string(&path).unwrap().contains("cudarc::");
        assert!(!named || path.ends_with("src/driver.rs"), "{} names cudarc", path.display());
    }
}

#[test]
fn every_unsafe_block_says_why() {
    for path in files(&["src", "tests/simcuda"], &["rs"]) {
        let text = std::fs::read_to_string(&path).unwrap();
        let lines: Vec<&str> = text.lines().collect();
        for (i, line) in lines.iter().enumerate().filter(|(_, l)| l.contains("unsafe {") || l.contains("unsafe impl")) {
            let near = lines[i.saturating_sub(6)..=i].iter().any(|l| l.contains("SAFETY"));
            assert!(near, "{}:{}: no SAFETY: {line}", path.display(), i + 1);
        }
    }
}

#[test]
fn no_file_outgrows_its_room() {
    for file in files(&["src", "tests", "c_examples", "include"], &["rs", "c", "h"]) {
        let lines = std::fs::read_to_string(&file).unwrap().lines().count();
        assert!(lines <= 800, "{} has {lines} lines", file.display());
    }
}

/// One row of the README for every setting, with the words of `config/settings.rs`.
#[test]
fn the_readme_lists_every_setting() {
    let readme = read("README.md");
    let config = read("src/config/settings.rs");
    let mut settings = 0;
    for line in config.lines().filter(|l| l.trim_start().starts_with("opt(\"")) {
        let fields: Vec<&str> = line.split('"').skip(1).step_by(2).collect();
        let row = format!("| `{}` | {} | {} | {} |", fields[0], fields[1], fields[2], fields[3]);
        assert!(readme.contains(&row), "the README lacks this row:\n{row}");
        settings += 1;
    }
    let rows = readme.lines().filter(|l| l.starts_with("| `GPUPOOL_")).count();
    assert_eq!((settings > 5, rows), (true, settings), "the README's table has other rows");
}

#[test]
fn an_installed_tree_is_complete_and_compiles() {
    let dir = scratch("install");
    run(Command::new("make")
        .arg("-C")
        .arg(root())
        .args(["-s", "install", "PREFIX=/usr"])
        .arg(format!("DESTDIR={}", dir.display())));
    let out = run(Command::new("find").arg(".").args(["-not", "-type", "d"]).current_dir(&dir));
    let text = String::from_utf8(out.stdout).unwrap();
    let mut seen: Vec<&str> = text.lines().collect();
    seen.sort_unstable();
    let wanted = [
        "./usr/bin/gpupool",
        "./usr/include/cnmem.h",
        "./usr/include/gpupool.h",
        "./usr/lib/libcnmem.so.1",
        "./usr/lib/libgpupool.so",
        "./usr/lib/libgpupool.so.0",
        "./usr/lib/pkgconfig/gpupool.pc",
    ];
    assert_eq!(seen, wanted);
    // A program is compiled by what the pkg-config file says, moved to where the tree lies.
    let usr = dir.join("usr");
    let pc = std::fs::read_to_string(usr.join("lib/pkgconfig/gpupool.pc")).unwrap();
    assert!(pc.contains(&format!("Version: {}\n", env!("CARGO_PKG_VERSION"))), "{pc}");
    let field = |name: &str| {
        let value = pc.lines().find_map(|l| l.strip_prefix(name)).unwrap_or_else(|| panic!("{name} is not in\n{pc}"));
        let prefix = pc.lines().find_map(|l| l.strip_prefix("prefix=")).unwrap();
        assert_eq!(prefix, "/usr");
        let value = value.replace("${libdir}", "${prefix}/lib").replace("${includedir}", "${prefix}/include");
        value.replace("${prefix}", usr.to_str().unwrap())
    };
    let mut c = Command::new("gcc");
    c.args(["-std=c11", "-Wall", "-Wextra", "-Werror"]).args(field("Cflags:").split_whitespace());
    c.arg(root().join("c_examples/quickstart.c")).arg("-I").arg(root().join("tests/simcuda/include"));
    c.args(field("Libs:").split_whitespace()).arg("-L").arg(root().join("target/simcuda")).arg("-lcudart");
    run(c.arg("-o").arg(dir.join("quickstart")));
    let path = format!("{}:{}", usr.join("lib").display(), root().join("target/simcuda").display());
    run(Command::new(dir.join("quickstart")).env("LD_LIBRARY_PATH", path));
    // The command finds the library of its own tree.
    let out = run(Command::new(usr.join("bin/gpupool")).args(["run", "env"]).env_remove("GPUPOOL_LIBRARY"));
    let preloaded = format!("LD_PRELOAD={}", usr.join("lib/libgpupool.so").display());
    let text = String::from_utf8(out.stdout).unwrap();
    assert!(text.lines().any(|l| l.split([':']).next() == Some(&preloaded)), "{text}");
}
