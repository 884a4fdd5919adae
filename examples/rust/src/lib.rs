// SPDX-License-Identifier: Apache-2.0
//! The C API of Attune, as it is. Its documentation is the headers, attune/attune.h and attune/ops.h.
#![allow(non_camel_case_types, non_upper_case_globals)]

include!(concat!(env!("OUT_DIR"), "/bindings.rs"));
