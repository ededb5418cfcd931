/** What the calculator agents of this folder share: the words, the tool, and how it works things out. */

export type Task = { question: string };

export const INSTRUCTIONS = "Use the calculator tool. Reply with <answer>.";
export const TURNS = 4;
export const DESCRIPTION = "Work out an arithmetic expression.";
export const PARAMETERS = {
  type: "object" as const,
  properties: {
    expression: { description: "expression", title: "Expression", type: "string" as const },
  },
  required: ["expression"],
  additionalProperties: false,
};

const LARGEST = 1e15;
const NUMBER = /^(?:\d[\d_]*\.?[\d_]*|\.\d[\d_]*)(?:[eE][+-]?\d+)?/;
const WRONG = /^0[\d_]*[1-9][\d_]*$|_(?!\d)|\D_/; // 007, 1__0, 1_, 1._0

class NoExpression extends Error {}
class DivisionByZero extends Error {}

/** Work out an arithmetic expression; says the same as `calculator` of ../plain_agent.py. */
export function calculator(expression: string): string {
  let value: number;
  try {
    if ([...expression].length > 60) throw new NoExpression();
    value = new Reader(expression.trim()).whole();
  } catch (error) {
    if (error instanceof DivisionByZero) return "error: division by zero";
    if (error instanceof NoExpression)
      return "error: not an expression of numbers, + - * / and parentheses";
    throw error;
  }
  if (!(Math.abs(value) < LARGEST)) return "error: the result is too large";
  return Number.isInteger(value) ? String(value === 0 ? 0 : value) : twoDecimals(value);
}

/** The tool's answer to arguments as the model wrote them. */
export function call(args: string): string {
  try {
    const { expression } = JSON.parse(args);
    if (typeof expression === "string") return calculator(expression);
  } catch (error) {
    if (!(error instanceof SyntaxError || error instanceof TypeError)) throw error;
  }
  return "error: the calculator takes an expression as text";
}

/** Rounded half to even, as Python does; `toFixed` rounds half away from zero. */
function twoDecimals(value: number): string {
  const hundredths = value * 100;
  const tie = Number.isInteger(value * 8) && Math.abs(hundredths % 1) === 0.5;
  return tie ? (2 * Math.round(hundredths / 2) / 100).toFixed(2) : value.toFixed(2);
}

/** Reads numbers, + - * / and parentheses, with the usual precedence. */
class Reader {
  private rest: string;
  private dividedByZero = false; // only a whole expression is worked out

  constructor(text: string) {
    this.rest = text;
  }

  whole(): number {
    const value = this.sum();
    if (this.rest !== "") throw new NoExpression();
    if (this.dividedByZero) throw new DivisionByZero();
    return value;
  }

  private sum(): number {
    let value = this.product();
    for (;;) {
      if (this.takes("+")) value += this.product();
      else if (this.takes("-")) value -= this.product();
      else return value;
    }
  }

  private product(): number {
    let value = this.factor();
    for (;;) {
      if (this.takes("*")) value *= this.factor();
      else if (this.takes("/")) {
        const divisor = this.factor();
        this.dividedByZero ||= divisor === 0;
        value /= divisor;
      } else return value;
    }
  }

  private factor(): number {
    if (this.takes("-")) return -this.factor();
    if (this.takes("(")) {
      const value = this.sum();
      if (!this.takes(")")) throw new NoExpression();
      return value;
    }
    const [digits] = NUMBER.exec(this.rest) ?? [];
    if (digits === undefined || WRONG.test(digits)) throw new NoExpression();
    this.skip(digits.length);
    return Number(digits.replaceAll("_", ""));
  }

  private takes(sign: string): boolean {
    if (!this.rest.startsWith(sign)) return false;
    this.skip(sign.length);
    return true;
  }

  private skip(length: number): void {
    this.rest = this.rest.slice(length).replace(/^[ \t]+/, "");
  }
}
