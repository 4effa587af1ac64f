import json

from accelerate import Accelerator

accelerator = Accelerator()


@accelerator.on_main_process
def save_metrics(path, metrics):
    with open(path, "w") as f:
        json.dump(metrics, f)
    accelerator.wait_for_everyone()


def main():
    metrics = {"steps": 100, "processes": accelerator.num_processes}
    save_metrics("metrics.json", metrics)
    accelerator.print("finished")


if __name__ == "__main__":
    main()
