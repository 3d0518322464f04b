"""Side calls (titles, tags, summaries, probes, completions in an editor): how they are told from turns."""
