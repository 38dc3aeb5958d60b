#include "point_problem.h"

KERNEL double compute_ends(const PointProblem *problem, const int64_t *chosen, double *end_s)
{
    const int64_t nodes = problem->member.count;
    const int64_t *before_start = problem->before_start.at;
    const int64_t *before = problem->before.at;
    const double *time_s = problem->time_s.at;
    const double *lag_s = problem->before_lag_s.at;
    double makespan_s = 0.0;
    for (int64_t k = 0; k < nodes; k++) {
        /* Nodes come in topological order, so the ends of all predecessors are known. */
        double start_s = 0.0;
        for (int64_t i = before_start[k]; i < before_start[k + 1]; i++) {
            start_s = most_of(start_s, end_s[before[i]] + lag_s[i]);
        }
        end_s[k] = start_s + time_s[chosen[k]];
        makespan_s = most_of(makespan_s, end_s[k]);
    }
    return makespan_s;
}
