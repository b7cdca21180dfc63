"""Schedules of a pipeline: data, without torch.

```
actions     what a schedule is;  generators: how one is made, by its name in the config
simulate    when what happens, and whether a schedule can be played;  __main__: text and pictures
views       PipeSchedule, TrainSchedule, … and the instruction classes that scripts know
```
"""
