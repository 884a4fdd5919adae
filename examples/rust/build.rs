// SPDX-License-Identifier: Apache-2.0
//! Makes the bindings of attune/attune.h by the command bindgen (Debian: `apt-get install cargo bindgen clang`) and links libattune.
//!
//! ATTUNE_INCLUDE_DIR: where the headers are; default: this checkout's. ATTUNE_LIB_DIR: where libattune.so is; default: where the
//! linker looks.

use std::path::PathBuf;
use std::process::Command;
use std::{env, process};

fn main() {
    for name in ["ATTUNE_INCLUDE_DIR", "ATTUNE_LIB_DIR"] {
        println!("cargo:rerun-if-env-changed={name}");
    }
    let include = env::var("ATTUNE_INCLUDE_DIR").unwrap_or_else(|_| "../../include".to_string());
    let header = PathBuf::from(include).join("attune/attune.h");
    for name in ["attune.h", "ops.h"] {
        println!("cargo:rerun-if-changed={}", header.with_file_name(name).display());
    }

    let bindings = PathBuf::from(env::var("OUT_DIR").unwrap()).join("bindings.rs");
    let done = Command::new("bindgen")
        .args(["--no-doc-comments", "--no-prepend-enum-name", "--default-enum-style", "consts"])
        .args(["--allowlist-function", "attune_.*", "--allowlist-type", "attune_.*", "--allowlist-var", "ATTUNE_.*"])
        .arg("--output")
        .arg(&bindings)
        .arg(&header)
        .status();
    match done {
        Ok(status) if status.success() => {}
        Ok(status) => fail(&format!("bindgen could not read {}: {status}", header.display())),
        Err(error) => fail(&format!("bindgen is needed (apt-get install bindgen clang): {error}")),
    }

    println!("cargo:rustc-link-lib=dylib=attune");
    if let Ok(folder) = env::var("ATTUNE_LIB_DIR") {
        println!("cargo:rustc-link-search=native={folder}");
        println!("cargo:rustc-link-arg=-Wl,-rpath,{folder}");
    }
}

fn fail(what: &str) -> ! {
    eprintln!("{what}");
    process::exit(1)
}
