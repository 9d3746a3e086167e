// Which figure belongs to a lesson.

import type { Component } from "svelte";
import type { Arguments } from "../lib/contract";
import type { FigureProps } from "../parts/Panel.svelte";
import Assumption from "./Assumption.svelte";
import Divisors from "./Divisors.svelte";
import Flow from "./Flow.svelte";
import Gradients from "./Gradients.svelte";
import Heads from "./Heads.svelte";
import Jacobian from "./Jacobian.svelte";
import Layernorm from "./Layernorm.svelte";
import Overflow from "./Overflow.svelte";
import Race from "./Race.svelte";
import Saturation from "./Saturation.svelte";
import Scores from "./Scores.svelte";
import Variance from "./Variance.svelte";
import Vectors from "./Vectors.svelte";

export interface Drawn {
  figure: Component<FigureProps>;
  hide?: string[]; // controls that the figure draws itself
  wide?: boolean; // the figure takes the whole width
  lazy?: boolean; // too slow to be asked for with every change: the figure asks
  fixed?: (values: Arguments) => string[]; // controls that another one sets
  adjust?: (values: Arguments, name: string) => Arguments;
}

export const FIGURES: Record<string, Drawn> = {
  flow: { figure: Flow, hide: ["rule"], wide: true },
  vectors: { figure: Vectors },
  variance: { figure: Variance },
  saturation: { figure: Saturation },
  jacobian: { figure: Jacobian },
  gradients: { figure: Gradients },
  divisors: { figure: Divisors },
  heads: {
    figure: Heads,
    fixed: (values) => (values.preset === "custom" ? [] : ["d_model", "heads"]),
    // A preset fixes both numbers; whoever moves one of them leaves the preset.
    adjust: (values, name) =>
      name === "d_model" || name === "heads" ? { ...values, preset: "custom" } : values,
  },
  scores: { figure: Scores },
  layernorm: { figure: Layernorm },
  overflow: { figure: Overflow },
  assumption: { figure: Assumption },
  race: { figure: Race, wide: true, lazy: true },
};
