package main

// checks gives all of them, in the order of the run.
func checks() []check {
	all := answerChecks()
	all = append(all, wireChecks()...)
	all = append(all, streamChecks()...)
	all = append(all, loadChecks()...)
	return append(all, failureChecks()...)
}
