// SPDX-License-Identifier: Apache-2.0
#include "reference/prologue.h"

#include <algorithm>

namespace attune::reference {

bool Prologue::has_sums() const {
  return present(p_.q_bias) || present(p_.k_bias) || present(p_.v_bias) || present(p_.rope_cos_sin);
}

std::vector<double> Prologue::query(const Rows& q, int64_t row, int64_t head, const Token& token) const {
  std::vector<double> x = dequantised(q, row, head, 0);
  add_bias(p_.q_bias, head, x);
  rotate(token, x);
  const double factor = sized(logn(token.position));
  for (double& value : x) value *= factor;
  return x;
}

std::vector<double> Prologue::key(const Rows& k, int64_t row, int64_t head, const Token& token) const {
  std::vector<double> x = dequantised(k, row, head, 1);
  add_bias(p_.k_bias, head, x);
  multiply_ia3(p_.ia3_k, token.sequence, head, x);
  rotate(token, x);
  return x;
}

std::vector<double> Prologue::value(const Rows& v, int64_t row, int64_t head, const Token& token) const {
  std::vector<double> x = dequantised(v, row, head, 2);
  add_bias(p_.v_bias, head, x);
  multiply_ia3(p_.ia3_v, token.sequence, head, x);
  return x;
}

// Only 8-bit inputs are scaled. which: 0, 1, 2 for q, k, v.
std::vector<double> Prologue::dequantised(const Rows& rows, int64_t row, int64_t head, int64_t which) const {
  std::vector<double> x = rows.row(row, head);
  for (double& value : x) value = sized(value);
  if (present(p_.qkv_scale) && element_bytes(rows.dtype()) == 1) {
    const double scale = sized(number_at(p_.qkv_scale, which));
    for (double& value : x) value *= scale;
  }
  return x;
}

void Prologue::add_bias(const attune_tensor& bias, int64_t head, std::vector<double>& x) const {
  if (!present(bias)) return;
  for (size_t d = 0; d < x.size(); ++d) x[d] += sized(number_at(bias, head, static_cast<int64_t>(d)));
}

void Prologue::multiply_ia3(const attune_tensor& weights, int64_t sequence, int64_t head,
                            std::vector<double>& x) const {
  if (!present(weights)) return;
  const int64_t task = present(p_.ia3_task) ? integer_at(p_.ia3_task, sequence) : 0;
  if (task < 0 || task >= weights.shape[0]) return;
  for (size_t d = 0; d < x.size(); ++d) x[d] *= sized(number_at(weights, task, head, static_cast<int64_t>(d)));
}

int64_t Prologue::mrope_component(int64_t pair) const {
  const int64_t d1 = p_.mrope_section[0], d2 = p_.mrope_section[1], d3 = p_.mrope_section[2];
  if (d1 + d2 + d3 == 0) return 0;
  if (p_.mrope_interleaved != 0) {
    if (pair % 3 == 1 && pair < 3 * d2) return 1;
    if (pair % 3 == 2 && pair < 3 * d3) return 2;
    return 0;
  }
  const int64_t u = pair % (d1 + d2 + d3);
  return u < d1 ? 0 : u < d1 + d2 ? 1 : 2;
}

int64_t Prologue::rope_position(const Token& token, int64_t pair) const {
  if (!present(p_.positions) || token.row < 0) return token.position;
  if (p_.positions.rank == 1) return integer_at(p_.positions, token.row);
  return integer_at(p_.positions, token.row, std::min(mrope_component(pair), p_.positions.shape[1] - 1));
}

void Prologue::rotate(const Token& token, std::vector<double>& x) const {
  const attune_tensor& table = p_.rope_cos_sin;
  if (!present(table)) return;
  const int64_t index = present(p_.rope_table_index) ? integer_at(p_.rope_table_index, token.sequence) : 0;
  if (index < 0 || index >= (table.rank == 3 ? table.shape[0] : 1)) return;
  const int64_t num_positions = table.shape[table.rank - 2], half = table.shape[table.rank - 1] / 2;
  const auto entry = [&](int64_t position, int64_t column) {
    return sized(table.rank == 3 ? number_at(table, index, position, column) : number_at(table, position, column));
  };
  for (int64_t j = 0; j < half; ++j) {
    const int64_t position = rope_position(token, j);
    if (position < 0 || position >= num_positions) continue;
    const double c = entry(position, j), s = entry(position, half + j);
    const int64_t first = p_.rope_offset + (p_.rope_interleaved != 0 ? 2 * j : j);
    const int64_t second = p_.rope_interleaved != 0 ? first + 1 : first + half;
    double& a = x[static_cast<size_t>(first)];
    double& b = x[static_cast<size_t>(second)];
    const double rotated = magnitudes_ ? c * a + s * b : c * a - s * b;
    b = c * b + s * a;
    a = rotated;
  }
}

// By absolute position, not by rope position; the last entry serves all later ones.
double Prologue::logn(int64_t position) const {
  if (!present(p_.logn) || p_.logn.shape[0] == 0) return 1.0;
  return number_at(p_.logn, std::clamp<int64_t>(position, 0, p_.logn.shape[0] - 1));
}

}  // namespace attune::reference
