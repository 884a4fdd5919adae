# SPDX-License-Identifier: Apache-2.0
"""Attune inside other libraries: `attune.integrations.torch`, `attune.integrations.torch_flash`, `attune.integrations.transformers`."""
