// SPDX-License-Identifier: Apache-2.0
// report.json and report.html of a replay.
#pragma once

#include <string>

#include "replay.h"
#include "summary.h"

namespace attune::cli {

// Makes the directory and sees that report.json and report.html can be written there. Throws UserError. Called before a
// run, so that a run is never lost.
void prepare_output(const std::string& directory);
// Everything: settings, figures, plans, the series of steps and of requests.
std::string report_json(const ReplayResult& result, const Summary& summary);
// The page. plots: HTML from make_plots, or empty, and then why not.
std::string report_html(const ReplayResult& result, const Summary& summary, const std::string& plots,
                        const std::string& why_no_plots);
// Runs the plotting script on report.json. Empty, with the reason in `why`, where python3 or matplotlib is missing.
std::string make_plots(const std::string& json_path, std::string& why);
// All of it. Returns the path of report.html.
std::string write_report(const ReplayResult& result, const Summary& summary);

}  // namespace attune::cli
