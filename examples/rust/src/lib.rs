// SPDX-License-Identifier: Apache-2.0
//! The C API of Attune, as it is. Its documentation is the header, attune/attune.h.
#![allow(non_camel_case_types, non_upper_case_globals)]

include!(concat!(env!("OUT_DIR"), "/bindings.rs"));
