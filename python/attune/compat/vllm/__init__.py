# SPDX-License-Identifier: Apache-2.0
"""Attention operators of vLLM under the names of their modules."""
