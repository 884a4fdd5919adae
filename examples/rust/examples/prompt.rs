// SPDX-License-Identifier: Apache-2.0
//! Causal attention of one prompt, compared with plain loops in f64; and what an error looks like.

use attune_sys::*;
use std::ffi::CStr;
use std::mem::{size_of, MaybeUninit};
use std::ptr;

const TOKENS: usize = 16;
const HEADS_Q: usize = 4;
const HEADS_KV: usize = 2;
const HEAD_DIM: usize = 32;
const ALIGNMENT: usize = 256; // of workspaces

fn check(status: attune_status) -> Result<(), String> {
    if status == ATTUNE_OK {
        return Ok(());
    }
    Err(unsafe { CStr::from_ptr(attune_last_error()) }.to_string_lossy().into_owned())
}

/// [tokens, heads, HEAD_DIM]
fn tensor(data: &mut [f32], heads: usize) -> attune_tensor {
    let shape = [TOKENS as i64, heads as i64, HEAD_DIM as i64];
    unsafe { attune_dense_tensor(data.as_mut_ptr().cast(), ATTUNE_FLOAT32, 3, shape.as_ptr()) }
}

fn expected(q: &[f32], k: &[f32], v: &[f32]) -> Vec<f64> {
    let at = |x: &[f32], heads: usize, token: usize, head: usize, i: usize| x[(token * heads + head) * HEAD_DIM + i] as f64;
    let mut out = Vec::new();
    for token in 0..TOKENS {
        for head in 0..HEADS_Q {
            let of_kv = head / (HEADS_Q / HEADS_KV);
            let weights: Vec<f64> = (0..=token)
                .map(|key| {
                    let product: f64 = (0..HEAD_DIM).map(|i| at(q, HEADS_Q, token, head, i) * at(k, HEADS_KV, key, of_kv, i)).sum();
                    (product / (HEAD_DIM as f64).sqrt()).exp()
                })
                .collect();
            let sum: f64 = weights.iter().sum();
            for i in 0..HEAD_DIM {
                out.push(weights.iter().enumerate().map(|(key, weight)| weight * at(v, HEADS_KV, key, of_kv, i)).sum::<f64>() / sum);
            }
        }
    }
    out
}

fn main() -> Result<(), String> {
    let wave = |count: usize, step: f32| (0..count * HEAD_DIM).map(|i| (i as f32 * step).sin()).collect::<Vec<f32>>();
    let mut q = wave(TOKENS * HEADS_Q, 0.37);
    let mut k = wave(TOKENS * HEADS_KV, 0.91);
    let mut v = wave(TOKENS * HEADS_KV, 0.53);
    let mut out = vec![f32::NAN; q.len()];
    let want = expected(&q, &k, &v);

    let cpu = attune_device { type_: ATTUNE_DEVICE_CPU as i32, index: 0 };
    let mut attention = MaybeUninit::<attune_attention>::uninit();
    check(unsafe { attune_attention_init(attention.as_mut_ptr(), size_of::<attune_attention>() as u64) })?;
    let mut attention = unsafe { attention.assume_init() };
    attention.q = tensor(&mut q, HEADS_Q);
    attention.k = tensor(&mut k, HEADS_KV);
    attention.v = tensor(&mut v, HEADS_KV);
    attention.out = tensor(&mut out, HEADS_Q);
    attention.causal = 1;

    let mut plan = ptr::null_mut();
    check(unsafe { attune_plan_create(&attention, cpu, &mut plan) })?;
    let mut bytes = 0;
    check(unsafe { attune_plan_workspace_size(plan, &mut bytes) })?;
    let mut memory = vec![0u8; bytes as usize + ALIGNMENT];
    let workspace = unsafe { memory.as_mut_ptr().add(memory.as_ptr().align_offset(ALIGNMENT)) };
    check(unsafe { attune_run(plan, &attention, workspace.cast(), bytes, ptr::null_mut()) })?;
    check(unsafe { attune_plan_destroy(plan) })?;

    let errors: Vec<f64> = out.iter().zip(&want).map(|(got, want)| (*got as f64 - want).abs()).collect();
    let version = unsafe { CStr::from_ptr(attune_version()) }.to_string_lossy();
    println!("attune {version}: {TOKENS} tokens, largest error {:.1e}", errors.iter().copied().fold(0.0, f64::max));
    if !errors.iter().all(|error| *error <= 1e-5) {
        return Err("the answer is wrong".to_string());
    }

    attention.softcap = -1.0;
    match check(unsafe { attune_supported(&attention, cpu) }) {
        Err(reason) => println!("refused: {reason}"),
        Ok(()) => return Err("a softcap of -1 was taken".to_string()),
    }
    Ok(())
}
