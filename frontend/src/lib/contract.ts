// What the server and the page say to each other; the Python side is scaledot.lab.server.

export type Json = null | boolean | number | string | Json[] | { [key: string]: Json };
export type Arguments = Record<string, Json>;

export interface Control {
  name: string;
  kind: "choice" | "steps" | "range" | "toggle" | "text" | "numbers" | "number";
  default: Json;
  values?: Json[];
  low?: number | null;
  high?: number | null;
  step?: number | null;
  length?: number | null;
}

export interface Lesson {
  name: string;
  controls: Control[];
}

export interface Lessons {
  version: string;
  lessons: Lesson[];
  languages: string[];
  run: boolean;
  study?: Json; // what many races found, the same whatever is raced
  lang?: string; // of the command that started the lab
}

export interface Claim {
  key: string;
  folklore: Json;
  measured: Json;
  theory: Json;
  agrees: boolean | null; // null: this measurement cannot tell
  tolerance: number | null;
}

// Results are looked at by path; a panel names the fields it draws.
export type Result = Record<string, any> & { claims?: Claim[] };

export interface Answer {
  sequence?: number;
  lesson: string;
  arguments: Arguments;
  result: Result;
  python: string;
}

export interface Card {
  front: string;
  back: string;
}

export type Catalogue = Record<string, string>;

/** What a server puts into the document itself: the words of one language. */
export interface Start {
  lessons: Lessons;
  catalogue: Record<string, Catalogue>;
}

export interface Canned extends Start {
  version: string;
  flashcards: Record<string, Card[]>;
  anki: Record<string, string>;
  answers: Answer[];
  race?: { arguments: Arguments; steps: Json[] }[];
}
